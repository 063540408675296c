"""Why a push is sent in full in place of a delta."""

from __future__ import annotations

import enum

__all__ = ["MOST_CHANGED", "PAYS_BELOW", "Fallback", "Unfit"]

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


class Unfit(Exception):  # noqa: N818 - no error: the push goes on in full
    """No delta can be sent, or none that pays; the same push in full can.

    Attributes:
        reason: What the result and the server's counter tell.
        text: The same for people.
    """

    def __init__(self, reason: Fallback, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
