"""One job of the trainer, what its caller learns of it, and the jobs that wait."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2 as pb

#: Events that wait for the caller to read them; of more, steps that committed nothing are dropped.
_MOST_EVENTS = 1000


class TrainJob:
    """From its request to its end. Every method belongs to the event loop's thread.

    `request` is what the user's class is given. `cancelled` is set once the job shall end.
    `attempts` counts how often a trainer was given the job; `begun` says whether the user's class
    has it. `version` is the last one that the job has committed; 0: none.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.id = secrets.token_hex(8)
        self.request = request
        self.cancelled = asyncio.Event()
        self._when_cancelled: Callable[[], None] | None = None
        self.attempts = 0
        self.begun = False
        self.steps = 0
        self.version = 0
        self._events: deque[pb.TrainResponse] = deque()
        self._news = asyncio.Event()
        self._end: WeightSyncError | None = None
        self.ended = False
        self._why = cancelled_job(self.id)

    def tell(self, event: pb.TrainResponse) -> None:
        event.job_id = self.id
        if len(self._events) >= _MOST_EVENTS and _droppable(event):
            return
        self._events.append(event)
        self._news.set()

    @contextlib.contextmanager
    def when_cancelled(self, call: Callable[[], None]) -> Iterator[None]:
        """Have something called if the job is cancelled meanwhile."""
        self._when_cancelled = call
        try:
            yield
        finally:
            self._when_cancelled = None

    def cancel(self, why: WeightSyncError | None = None) -> None:
        """Have it end; `why` is what the caller is told, None: that it was cancelled."""
        if not self.cancelled.is_set():
            self._why = why or self._why
            self.cancelled.set()
            if self._when_cancelled is not None:
                self._when_cancelled()

    def end(self, error: WeightSyncError | None) -> str:
        """Take note of its end and return which: finished, failed or cancelled."""
        if error is not None and self.cancelled.is_set():
            error = self._why
        if error is not None and self.version:
            metadata = {**error.metadata, "version": str(self.version)}
            error = WeightSyncError(error.reason, error.message, metadata=metadata)
        self._end, self.ended = error, True
        self._news.set()
        if error is None:
            return "finished"
        return "cancelled" if self.cancelled.is_set() else "failed"

    async def events(self) -> AsyncIterator[pb.TrainResponse]:
        """Yield what becomes of it, to its end, or raise why it did not end well."""
        while True:
            self._news.clear()
            while self._events:
                yield self._events.popleft()
            if self.ended and not self._events:
                break
            await self._news.wait()
        if self._end is not None:
            raise self._end


def cancelled_job(job_id: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.CANCELLED,
        f"job {job_id} was cancelled; what it committed stays; send it again for the rest",
    )


def _droppable(event: pb.TrainResponse) -> bool:
    return event.WhichOneof("event") == "step" and not event.step.version


_RETRY_AFTER_S = 5.0


class JobQueue:
    """Every method belongs to the event loop's thread.

    `most` jobs may be before a new one, the one that runs included.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: deque[TrainJob] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def ids(self) -> list[str]:
        return [job.id for job in self._jobs]

    def add(self, job: TrainJob, running: int) -> int:
        """Have a job wait, behind so many that are `running`; return how many are before it."""
        ahead = len(self._jobs) + running
        if ahead > self._most:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"{ahead} jobs run or wait, the most there may be; send it later, or raise "
                "trainer_queue",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._jobs.append(job)
        self._filled.set()
        return ahead

    def put_back(self, job: TrainJob) -> None:
        self._jobs.appendleft(job)
        self._filled.set()

    async def filled(self) -> None:
        while not self._jobs:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> TrainJob | None:
        return self._jobs.popleft() if self._jobs else None

    def find(self, job_id: str) -> TrainJob | None:
        return next((job for job in self._jobs if job.id == job_id), None)

    def remove(self, job: TrainJob) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def clear(self) -> list[TrainJob]:
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs
