"""How the bytes of a push go to the server, and why not another way."""

from __future__ import annotations

import enum

__all__ = ["Streamed", "Way"]


class Way(enum.StrEnum):
    """How the bytes of a push go to the server."""

    STREAM = enum.auto()
    SAME_HOST = enum.auto()


class Streamed(enum.StrEnum):
    """Why bytes of a push did not go the fastest way there is to a server on the same host.

    They were sent over the link in place of written into the server's memory; but with SEVERAL_GPUS
    they were written there by this process, in place of copied by the server.

    Attributes:
        OFF: This push was told to (`same_host="never"`).
        OTHER_HOST: The address of the server is neither a unix socket nor loopback.
        DELTA: A delta is small; it is always sent.
        ITERABLE: The layout of an iterable is not known before its end.
        NOT_OFFERED: The server does not lend its memory, or not to this caller.
        UNREACHABLE: The offer's socket could not be opened from here, or was closed meanwhile.
        REFUSED: The server refused on the way.
        RESUMED: Some shards had been begun over the link before.
        WRITER_LEFT: Another process of the trainer kept the server's memory open.
        SEVERAL_GPUS: Some shards hold tensors of several GPUs; the server copies from one at a
            time. Push the tensors of one GPU after those of the other.
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
