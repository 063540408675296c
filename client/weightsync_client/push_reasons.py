"""How the bytes of a push go to the server, and why not as a delta or another way."""

from __future__ import annotations

import enum

#: Bytes of a delta over those of a push in full from which on the latter is sent.
PAYS_BELOW = 0.9
#: Share of changed elements from which on all is sent over a link that is not slow: to find, pack
#: and patch each of them then takes longer than to send it with its neighbours.
MOST_CHANGED = 1 / 3


class Fallback(enum.StrEnum):
    """Why a push was sent in full in place of a delta.

    Attributes:
        FIRST: This client holds no committed version to compare with.
        NO_ROOM: Memory does not suffice for a copy of the model, or for the delta.
        NEW_RUN: The metadata names another run_id than the last version's.
        BASE_MISMATCH: The server does not hold the last version any more, or another one.
        LAYOUT_CHANGED: Names, dtypes or shapes differ from the last version's.
        TOO_DENSE: The delta would not have been much smaller.
        REFUSED: The server would not take the delta.
        COPIED: The server copies everything from this host's GPUs itself and keeps it in memory
            only, which takes less time than to find what changed.
    """

    FIRST = enum.auto()
    NO_ROOM = enum.auto()
    NEW_RUN = enum.auto()
    BASE_MISMATCH = enum.auto()
    LAYOUT_CHANGED = enum.auto()
    TOO_DENSE = enum.auto()
    REFUSED = enum.auto()
    COPIED = enum.auto()


class TransferPath(enum.StrEnum):
    """How the bytes of a push go to the server."""

    STREAM = enum.auto()
    SAME_HOST = enum.auto()


class Streamed(enum.StrEnum):
    """Why bytes of a push did not go the fastest way there is to a server on the same host.

    They were sent over the link in place of written into the server's memory; but with SEVERAL_GPUS
    and NOT_COPIED they were written there by this process, in place of copied by the server.

    Attributes:
        OFF: This push was told to (`same_host="never"`).
        OTHER_HOST: The address of the server is neither a unix socket nor loopback.
        DELTA: A delta is small; it is always sent.
        ITERABLE: The layout of an iterable is not known before its end; push it as `Declared`.
        NOT_OFFERED: The server does not lend its memory, or not to this caller.
        UNREACHABLE: The offer's socket could not be opened from here, or was closed meanwhile.
        REFUSED: The server refused on the way.
        RESUMED: Some shards had been begun over the link before.
        WRITER_LEFT: Another process of the trainer kept the server's memory open.
        SEVERAL_GPUS: Some shards hold tensors of several GPUs; the server copies from one at a
            time. Push the tensors of one GPU after those of the other.
        NOT_COPIED: The server cannot reach the memory of this process's GPU; the log tells why.
            What `expandable_segments` of PyTorch's allocator gives cannot be shared.
    """

    OFF = enum.auto()
    OTHER_HOST = enum.auto()
    DELTA = enum.auto()
    ITERABLE = enum.auto()
    NOT_OFFERED = enum.auto()
    UNREACHABLE = enum.auto()
    REFUSED = enum.auto()
    RESUMED = enum.auto()
    WRITER_LEFT = enum.auto()
    SEVERAL_GPUS = enum.auto()
    NOT_COPIED = enum.auto()


class DeltaUnsuitable(Exception):  # noqa: N818 - no error: the push goes on in full
    """No delta can be sent, or none that pays; the same push in full can.

    `reason` is what the result and the server's counter tell.
    """

    def __init__(self, reason: Fallback, text: str) -> None:
        super().__init__(text)
        self.reason = reason
