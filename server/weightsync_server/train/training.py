"""What callers can have done by the trainer: jobs and checkpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2 as pb
from weightsync_server.train.state_folders import StateFolders
from weightsync_server.train.train_job import TrainJob, cancelled_job
from weightsync_server.train.train_metrics import TrainMetrics
from weightsync_server.train.trained_engine import TrainedEngine
from weightsync_server.train.trainer_pool import TrainerPool

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync_server.engine import EngineSet
    from weightsync_server.model import Model
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.train.train_options import TrainOptions

__all__ = ["Training"]

#: A name, never a path: it begins with no dot, and has no slash.
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
#: Longest wait until a version that is live is durable, seconds.
_DURABLE_S = 600.0
#: When one more checkpoint may be asked for, seconds.
_RETRY_AFTER_S = 5.0


class Training:
    """The trainer of one server. `start`, then `stop`; every method belongs to the event loop.

    Args:
        options: Which trainer.
        engines: Of this host.
        model: What it trains.
        metrics: The server's.
    """

    def __init__(
        self,
        options: TrainOptions,
        engines: EngineSet,
        model: Model,
        metrics: Metrics,
    ) -> None:
        self._options = options
        self._model = model
        self._engine = TrainedEngine(engines, model.table, options.engine)
        self._folders = StateFolders(options.states, model.table)
        self._metrics = TrainMetrics(metrics)
        self._pool = TrainerPool(options, self._engine, self._folders, self._metrics)
        self._metrics.track(up=lambda: self._pool.alive, queued=lambda: len(self._pool.queue))
        self._stopping: WeightSyncError | None = None
        #: Checkpoints that are written or wait.
        self._checkpoints = 0

    async def start(self) -> None:
        """Begin to start the trainer.

        Raises:
            WeightSyncError: The folder of its states cannot be written.
        """
        await self._folders.open()
        self._pool.start_later()

    async def stop(self, longest_s: float) -> None:
        """Cancel every job, give the one that runs time to end, and end the trainer.

        Args:
            longest_s: What the job gets at most, in seconds.
        """
        why = WeightSyncError(
            Reason.SHUTTING_DOWN, "the server is ending; send the job again when it is back"
        )
        self._stopping = why
        for job in self._pool.queue.clear():
            self._pool.end_job(job, why)
        running = self._pool.running
        if running is not None:
            running.cancel(why)
            await self._pool.finish(min(self._options.grace_s, longest_s))
        await self._pool.stop()

    def submit(self, request: dict[str, Any]) -> TrainJob:
        """Have a job wait for its turn.

        Args:
            request: What the user's class is given.

        Raises:
            WeightSyncError: LIMIT_EXCEEDED, TRAINER_AWAY, SHUTTING_DOWN.
        """
        if refused := self._stopping or self._pool.hopeless:
            raise refused
        job = TrainJob(request)
        ahead = self._pool.queue.add(job, int(self._pool.running is not None))
        job.tell(pb.TrainResponse(queued=pb.TrainQueued(ahead=ahead)))
        return job

    def cancel(self, job: TrainJob) -> None:
        """End a job that waits or runs; of another one nothing is changed."""
        if job.ended:
            return
        job.cancel()
        if job is not self._pool.running:
            self._pool.queue.remove(job)
            self._pool.end_job(job, cancelled_job(job.id))

    def find(self, job_id: str) -> TrainJob:
        """Return a job that waits or runs.

        Raises:
            WeightSyncError: JOB_UNKNOWN.
        """
        running = self._pool.running
        job = running if running and running.id == job_id else self._pool.queue.find(job_id)
        if job is None:
            raise WeightSyncError(
                Reason.JOB_UNKNOWN,
                f"no job {job_id[:64]!r} waits or runs; see GetTrainStatus for those that do",
            )
        return job

    async def checkpoint(self, folder: str) -> pb.CheckpointResponse:
        """Return when the live version is durable: which it is, and what its folder is like.

        Args:
            folder: Name of that; "": none is wanted.

        Raises:
            WeightSyncError: REQUEST_INVALID, NOT_SUPPORTED, ENGINE_AWAY, TRAINER_AWAY,
                LIMIT_EXCEEDED, SHUTTING_DOWN.
        """
        if self._stopping is not None:
            raise self._stopping
        target = self._target(folder) if folder else None
        if not self._model.store.durable and target is None:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                "this server keeps versions in memory alone; name a folder, or start it with a "
                "--store that lasts",
            )
        if self._checkpoints > self._options.queue:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"ask for this checkpoint later, or raise trainer_queue: {self._checkpoints} are "
                "written or wait, the most there may be",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._checkpoints += 1
        try:
            return await self._checkpoint(target)
        finally:
            self._checkpoints -= 1

    async def _checkpoint(self, target: Path | None) -> pb.CheckpointResponse:
        # Behind the job that runs, and before the next one.
        async with self._pool.turn:
            version = self._engine.live.version
            if await self._model.table.settled(version, _DURABLE_S) is None:
                raise WeightSyncError(
                    Reason.VERSION_UNKNOWN,
                    f"version {version} was taken back before it was durable; call again",
                )
            if target is None:
                return pb.CheckpointResponse(version=version)
            missing = await self._pool.write_folder(version, target)
        return pb.CheckpointResponse(version=version, path=str(target), missing=missing)

    def status(self) -> pb.GetTrainStatusResponse:
        """Tell what the trainer does."""
        pool = self._pool
        running = pool.running
        return pb.GetTrainStatusResponse(
            state=pool.standing,
            reason=("" if pool.alive else self._engine.away) or pool.reason,
            pid=next(iter(pool.pids), 0),
            restarts=pool.restarts,
            running_job_id=running.id if running else "",
            running_steps=running.steps if running else 0,
            queued_job_ids=pool.queue.ids,
            state_version=pool.state.version,
            **pool.counts,
        )

    def _target(self, folder: str) -> Path:
        below = self._options.checkpoints
        if below is None:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "this server writes no folders; start it with --checkpoint-dir, or name none",
            )
        if not _FOLDER.fullmatch(folder):
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "folder must be a name of at most 128 letters, digits and . _ - that begins with "
                "none of . and -",
            )
        target = below / folder
        if target.exists() or target.is_symlink():
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"{target} is there already; name another folder"
            )
        return target
