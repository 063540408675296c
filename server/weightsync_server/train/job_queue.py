"""Jobs that wait for the trainer, in the order in which they came, and no more than it may be."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync_server.train.train_job import TrainJob

__all__ = ["JobQueue"]

_RETRY_AFTER_S = 5.0


class JobQueue:
    """Every method belongs to the event loop's thread.

    Args:
        most: Jobs that may be before one that comes, the one that runs included.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: deque[TrainJob] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._jobs)

    @property
    def ids(self) -> list[str]:
        """Jobs that wait, the next one first."""
        return [job.id for job in self._jobs]

    def add(self, job: TrainJob, running: int) -> int:
        """Have a job wait; return how many are before it.

        Args:
            job: The job.
            running: How many run.

        Raises:
            WeightSyncError: LIMIT_EXCEEDED.
        """
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
        """Have a job be the next one again."""
        self._jobs.appendleft(job)
        self._filled.set()

    async def filled(self) -> None:
        """Return when a job waits."""
        while not self._jobs:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> TrainJob | None:
        """Return the next job, which waits no more; None: none waits."""
        return self._jobs.popleft() if self._jobs else None

    def find(self, job_id: str) -> TrainJob | None:
        """Return a job that waits."""
        return next((job for job in self._jobs if job.id == job_id), None)

    def remove(self, job: TrainJob) -> None:
        """Have a job wait no more, if it does."""
        if job in self._jobs:
            self._jobs.remove(job)

    def clear(self) -> list[TrainJob]:
        """Return all jobs, which wait no more."""
        jobs = list(self._jobs)
        self._jobs.clear()
        return jobs
