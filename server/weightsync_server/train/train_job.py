"""One job of the trainer, and what its caller learns of it."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["TrainJob"]

#: Events that wait for the caller to read them; of more, steps that committed nothing are dropped.
_MOST_EVENTS = 1000


class TrainJob:
    """From its request to its end. Every method belongs to the event loop's thread.

    Args:
        request: What the user's class is given.

    Attributes:
        id: Names it.
        request: As given.
        cancelled: Set once it shall end.
        on_cancel: Called when it is cancelled.
        attempts: Times that a trainer was given it.
        begun: Whether the user's class has it.
        steps: How many it has told of.
        version: The last one that it has committed; 0: none.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = secrets.token_hex(8)
        self.request = request
        self.cancelled = asyncio.Event()
        self.on_cancel: Callable[[], None] = lambda: None
        self.attempts = 0
        self.begun = False
        self.steps = 0
        self.version = 0
        self._events: deque[pb.TrainResponse] = deque()
        self._news = asyncio.Event()
        self._end: WeightSyncError | None = None
        self._ended = False
        self._why = cancelled_job(self.id)

    @property
    def ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self._ended

    def tell(self, event: pb.TrainResponse) -> None:
        """Have the caller learn something."""
        event.job_id = self.id
        if len(self._events) >= _MOST_EVENTS and _droppable(event):
            return
        self._events.append(event)
        self._news.set()

    def cancel(self, why: WeightSyncError | None = None) -> None:
        """Have it end.

        Args:
            why: What the caller is told; None: that it was cancelled.
        """
        if not self.cancelled.is_set():
            self._why = why or self._why
            self.cancelled.set()
            self.on_cancel()

    def end(self, error: WeightSyncError | None) -> str:
        """Take note of its end and return which: finished, failed or cancelled.

        Args:
            error: Why it has not ended well.
        """
        if error is not None and self.cancelled.is_set():
            error = self._why
        if error is not None and self.version:
            metadata = {**error.metadata, "version": str(self.version)}
            error = WeightSyncError(error.reason, error.message, metadata=metadata)
        self._end, self._ended = error, True
        self._news.set()
        if error is None:
            return "finished"
        return "cancelled" if self.cancelled.is_set() else "failed"

    async def events(self) -> AsyncIterator[pb.TrainResponse]:
        """Yield what becomes of it, to its end.

        Raises:
            WeightSyncError: TRAINER_FAILED, TRAINER_AWAY, CANCELLED, SHUTTING_DOWN.
        """
        while True:
            self._news.clear()
            while self._events:
                yield self._events.popleft()
            if self._ended and not self._events:
                break
            await self._news.wait()
        if self._end is not None:
            raise self._end


def cancelled_job(job_id: str) -> WeightSyncError:
    """Return what is said of a job that was cancelled."""
    return WeightSyncError(
        Reason.CANCELLED,
        f"job {job_id} was cancelled; what it had committed stays, send it again for the rest",
    )


def _droppable(event: pb.TrainResponse) -> bool:
    return event.WhichOneof("event") == "step" and not event.step.version
