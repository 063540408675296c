"""What an ingest process tells the server without being asked, and what it answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync.wire import frames
from weightsync_server.auth.caller import RejectedCall

if TYPE_CHECKING:
    from weightsync.errors import WeightSyncError

__all__ = ["Notices"]

#: Seconds for which what happens is summed up before it is told.
_SUM_S = 0.1
#: Refusals that are told apart in one sum; what comes on top is told without its sentence.
_MOST = 32


class Notices:
    """Tells sums, so that however many calls are refused, little is sent, and nothing is lost.

    While the server takes nothing, sums grow and no message is added.
    """

    def __init__(self) -> None:
        self._refused: Counter[tuple[str, str, RejectedCall]] = Counter()
        self._fault = False
        self._writer: asyncio.StreamWriter | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, writer: asyncio.StreamWriter) -> None:
        """Tell from now on: the server knows that the process is ready."""
        self._writer = writer
        self._later()

    def refuse(self, error: WeightSyncError, attempt: RejectedCall, times: int = 1) -> None:
        """A call was refused at the door."""
        # Strangers are only counted: their addresses must not take the place of principals.
        known = attempt if error.reason is Reason.PERMISSION_DENIED else RejectedCall()
        kind = error.reason.value, error.message, known
        if kind not in self._refused and len(self._refused) >= _MOST:
            kind = error.reason.value, "and calls of more kinds", RejectedCall()
        self._refused[kind] += times
        self._later()

    def fault(self) -> None:
        """A call failed by a fault of this program."""
        self._fault = True
        self._later()

    def answer(self, document: dict[str, Any]) -> None:
        """Answer what the server asked, after all that happened before."""
        self._tell()
        if self._writer is not None:
            self._writer.write(frames.encode(document))

    def _later(self) -> None:
        if self._writer is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SUM_S, self._at_last)

    def _at_last(self) -> None:
        self._timer = None
        self._tell()
        if self._refused or self._fault:
            self._later()

    def _tell(self) -> None:
        if self._writer is None or self._writer.transport.get_write_buffer_size():
            return
        if self._fault:
            self._fault = False
            self._writer.write(frames.encode({"op": "fault"}))
        refused, self._refused = self._refused, Counter()
        for (reason, message, attempt), times in refused.items():
            notice = {"op": "refused", "reason": reason, "message": message, "times": times}
            self._writer.write(frames.encode(notice | {"attempt": list(attempt)}))
