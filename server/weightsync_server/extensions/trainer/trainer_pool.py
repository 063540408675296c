"""The trainer's process: started when the engine serves, given one job at a time, replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync import __version__
from weightsync.backoff import until
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.v1 import train_pb2 as pb
from weightsync.wire.child_channel import noted
from weightsync.wire.documents import refusal_of
from weightsync_server.extensions.trainer.train_job import JobQueue, TrainJob
from weightsync_server.extensions.trainer.train_state import LOAD, OptimizerState, StateFolders
from weightsync_server.extensions.trainer.trainer_settings import (
    TrainerSettings,
    trainer_environment,
)
from weightsync_server.ops.tasks import to_end
from weightsync_server.workers.runtime.child_process import ChildGoneError, ChildProcess, Program
from weightsync_server.workers.runtime.process_pool import ProcessPool

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.engine import EngineApplier, EngineSet
    from weightsync_server.ops.metrics import Metrics


logger = logging.getLogger(__name__)


def away(why: str) -> WeightSyncError:
    """Return the refusal of a job for want of a trainer, of which there will be one soon."""
    return WeightSyncError(
        Reason.TRAINER_AWAY,
        f"check the server's log, then send it again: no trainer is available ({why})",
    )


def unstartable(error: WeightSyncError, again_s: float) -> WeightSyncError:
    """Return the refusal of a job where no trainer will be there unless somebody does something.

    `error` says why a start has failed, with the remedy. `again_s` is the longest time until the
    next start.
    """
    return WeightSyncError(
        Reason.TRAINER_AWAY,
        f"no trainer can be started; the server tries again within {again_s:g} s: {error.message}",
        metadata=error.metadata,
    )


def ending(status: int | None) -> str:
    """Return how a process has ended, as the end of a sentence."""
    if status is None:
        return "does not end"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


#: From one look at an engine that does not serve to the next, seconds.
_LOOK_S = 0.2


class TrainedEngine:
    """What there is to know of it; a `name` of "" is the only one of this host's `engines`."""

    def __init__(self, engines: EngineSet, table: VersionTable, name: str) -> None:
        self._engines = engines
        self._table = table
        self._name = name

    @property
    def away(self) -> str:
        """Why nothing can be trained in it now; "": it serves."""
        try:
            applier = self._applier()
        except WeightSyncError as error:
            return error.message
        if applier.supervisor.serving and applier.supervisor.served.live:
            return ""
        return f"engine {applier.name} does not serve a version yet"

    @property
    def live(self) -> VersionRecord:
        """The version that it serves; REQUEST_INVALID: which engine it is is not known."""
        applier = self._applier()
        record = self._table.find(applier.supervisor.served.live)
        if record is None:
            raise WeightSyncError(Reason.ENGINE_AWAY, f"{self.away}; call again when it does")
        return record

    @property
    def settled_version(self) -> int:
        """The version that it serves, if that stays; 0: none, or it may be taken back yet."""
        try:
            record = self.live
        except WeightSyncError:
            return 0
        return record.version if record.commit is not None and not record.in_place else 0

    @property
    def loaded(self) -> frozenset[str] | None:
        """What the engines of this host have loaded, this one or not; None: one has not told."""
        return self._engines.loaded

    async def wait_serving(self) -> None:
        await until(lambda: not self.away, _LOOK_S)

    def _applier(self) -> EngineApplier:
        found = self._engines.named(self._name)
        if len(found) > 1:
            names = ", ".join(applier.name for applier in found)
            raise invalid_request(
                f"this host has several engines; name one of {names} with --trainer-engine"
            )
        return found[0]


JOB_OUTCOMES = ("finished", "failed", "cancelled")


class TrainMetrics:
    """Counts for one trainer; a server that supervises none has none of them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.jobs = metrics.counters(
            "weightsync_train_jobs_total", "Jobs of the trainer ended.", "outcome", JOB_OUTCOMES
        )
        self.restarts = metrics.counter(
            "weightsync_trainer_restarts_total", "Trainers started again."
        )

    def track(self, *, up: Callable[[], float], queued: Callable[[], float]) -> None:
        """Have what changes be read at each scrape.

        `up` returns 1 while the trainer waits for jobs, or runs one. `queued` counts jobs that
        wait.
        """
        self._metrics.track(
            "weightsync_trainer_up", "1 while the trainer waits for jobs, or runs one.", up
        )
        self._metrics.track("weightsync_train_queued_jobs", "Jobs that wait.", queued)


_MODULE = "weightsync_client.trainer"
_HEARTBEAT_S = 5.0
#: What cannot be imported may be mended; each try costs an import of PyTorch.
_MOST_BACKOFF_S = 60.0
#: Trainers that a job may cost before its own code has begun.
_MOST_ATTEMPTS = 3
#: Longest time to write a folder, seconds.
_FOLDER_S = 3600.0
#: Output of the user's class, beside the log.
_STDERR = 2
_SLOW_REMEDY = (
    "shorten the setup of the class, or start the server with a higher --trainer-start-timeout-s"
)


class TrainerPool(ProcessPool):
    """Keeps the one trainer running, and has it do the jobs of a queue.

    It works in the memory of `engine`; `folders` has the states of its optimizer. The holder of the
    lock `turn` has the trainer. `running` is the job that it does, or None. `hopeless` says why no
    trainer can be started; it is None if none was tried yet, or one was started. `counts` has the
    jobs that have ended, by outcome.
    """

    def __init__(
        self,
        options: TrainerSettings,
        engine: TrainedEngine,
        folders: StateFolders,
        metrics: TrainMetrics,
    ) -> None:
        python = str(options.python or "")
        program = Program(
            "trainer",
            _MODULE,
            Reason.TRAINER_AWAY,
            python,
            trainer_environment(os.environ),
            _STDERR,
            "see the server's log",
            _SLOW_REMEDY,
        )
        super().__init__(
            program,
            1,
            ready_timeout_s=options.start_timeout_s,
            heartbeat_s=min(_HEARTBEAT_S, options.silence_s / 3),
            alive_timeout_s=options.silence_s,
            most_backoff_s=_MOST_BACKOFF_S,
        )
        self._options = options
        self._engine = engine
        self._folders = folders
        self._metrics = metrics
        self.queue = JobQueue(options.queue)
        self.turn = asyncio.Lock()
        self.running: TrainJob | None = None
        self.state = OptimizerState()
        self.restarts = 0
        self.hopeless: WeightSyncError | None = None
        self.counts = dict.fromkeys(JOB_OUTCOMES, 0)
        #: Why its last process has ended, until a job has ended well.
        self._ended = ""
        #: Why the last start has failed, and whether the next one is waited for.
        self._failed: WeightSyncError | None = None
        self._waits = False
        #: Why the process says that it ends.
        self._leaving = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def standing(self) -> pb.TrainerState.ValueType:
        if not self.alive:
            return pb.TRAINER_STATE_AWAY if self._waits else pb.TRAINER_STATE_STARTING
        return pb.TRAINER_STATE_TRAINING if self.running else pb.TRAINER_STATE_READY

    @property
    def reason(self) -> str:
        """Why it is not ready; if it is, why it was last started again; "": nothing is wrong."""
        return self._failed.message if self._failed else self._ended

    async def finish(self, grace_s: float) -> None:
        """Wait until no job runs, or for so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()

    async def write_folder(self, version: int, target: Path) -> str:
        """Have the trainer write a version as a folder, which appears whole and durable.

        Return what a vLLM would miss in it, one sentence; "": nothing. `target` is not there yet.
        """
        process = next(iter(self._members), None)
        if process is None:
            if self._failed is not None:
                raise unstartable(self._failed, _MOST_BACKOFF_S)
            raise away(self._ended or "it is being started")
        options, loaded = self._options, self._engine.loaded
        request = {
            "op": "checkpoint",
            "version": version,
            "target": str(target),
            "owner": options.identity,
            # What an engine needs to start again is not removed, whichever it is.
            "keep": 0 if loaded is None else options.checkpoint_folders,
            "loaded": sorted(loaded or ()),
        }
        left = asyncio.Event()
        writing = asyncio.ensure_future(process.call(request, (), _FOLDER_S, left))
        try:
            # A caller that leaves ends it; who comes next finds the trainer with nothing to do.
            answer, _ = await to_end(writing, left.set)
        except ChildGoneError:
            raise away("its process ended while it wrote the folder") from None
        if "error" in answer:
            raise refusal_of(answer)
        return str(answer["missing"])

    def end_job(self, job: TrainJob, error: WeightSyncError | None) -> None:
        outcome = job.end(error)
        self.counts[outcome] += 1
        self._metrics.jobs[outcome].inc()
        logger.info("job %s %s%s", job.id, outcome, f": {error.message}" if error else "")

    # Of the process.

    async def _begin(self, place: int) -> ChildProcess:
        await self._engine.wait_serving()
        self._waits = False
        process = await super()._begin(place)
        self.hopeless = self._failed = None
        logger.info("trainer %d has the memory of the engine", process.pid)
        return process

    def _facts(self, place: int) -> Mapping[str, Any]:
        del place
        options = self._options
        return {
            "trainer": options.trainer,
            "address": options.address,
            "model": options.model,
            "engine": options.engine,
            "release": __version__,
        }

    def _lanes(self, process: ChildProcess) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._work(process)]

    def _not_started(self, error: WeightSyncError) -> None:
        self._failed, self._waits = error, True

    def _hopeless(self, error: WeightSyncError) -> None:
        self.hopeless = unstartable(error, _MOST_BACKOFF_S)
        for job in self.queue.clear():
            self.end_job(job, self.hopeless)

    def _lost(self) -> None:
        self.restarts += 1
        self._metrics.restarts.inc()

    async def _left(self, process: ChildProcess) -> None:
        why = self._leaving or process.ended_for or ending(process.exit_status)
        self._ended = f"trainer {process.pid} {why}"
        self._leaving = ""
        logger.warning("%s", self._ended)
        self.state = OptimizerState()
        job = self.running
        await self._folders.settle()
        if job is None:
            return
        self._put_down()
        if job.begun or job.cancelled.is_set() or job.attempts >= _MOST_ATTEMPTS:
            # What it has committed in the end was perhaps never told.
            live = self._engine.settled_version
            self.end_job(
                job, away(f"{self._ended}; version {live} is live" if live else self._ended)
            )
        else:
            self.queue.put_back(job)

    def _heard(self, notice: dict[str, Any]) -> None:
        op, job = notice.get("op"), self.running
        if op == "leaving":
            self._leaving = f"starts over: {notice['why']}"
        elif op == "saved":
            self._folders.keep(int(notice["version"]))
        elif op == "started" and job is not None:
            self._started(job, int(notice["version"]))
        elif op == "step" and job is not None:
            _step(job, notice)
        else:
            super()._heard(notice)

    # Of its jobs.

    async def _work(self, process: ChildProcess) -> None:
        self.state = OptimizerState(live=int(process.ready["version"]))
        while True:
            await self.queue.filled()
            async with self.turn:
                # What is live is to be known.
                await self._engine.wait_serving()
                job = self.queue.take()
                if job is not None:
                    await self._do(process, job)

    async def _do(self, process: ChildProcess, job: TrainJob) -> None:
        self.running = job
        self._idle.clear()
        job.attempts += 1
        live = self._engine.live
        plan = self.state.plan(live.version, self._folders.find(live.version))
        if plan.action == LOAD and not process.ready["loads"]:
            plan = self.state.plan(live.version, None)
        self.state.begin(plan)
        order = {
            "job": job.id,
            "version": live.version,
            "content_digest": live.content_digest,
            "state": plan.action,
            "folder": plan.folder,
            "saving": self._folders.saving,
        }
        request = {"op": "train", "order": order}
        loop = asyncio.get_running_loop()
        with noted({"request": job.request}) as fd:
            try:
                async with asyncio.timeout(None) as limit:

                    def give_grace() -> None:
                        limit.reschedule(loop.time() + self._options.grace_s)

                    with job.when_cancelled(give_grace):
                        answer, _ = await process.call(request, [fd], None, job.cancelled)
            except TimeoutError:
                logger.warning("job %s does not end: trainer %d is ended", job.id, process.pid)
                process.ended_for = (
                    f"did not end a job within {self._options.grace_s:g} s of its cancel, and was "
                    "ended"
                )
                raise ChildGoneError from None
        await self._folders.settle()
        self._answered(job, answer)
        self._put_down()

    def _put_down(self) -> None:
        self.running = None
        self._idle.set()

    def _answered(self, job: TrainJob, answer: dict[str, Any]) -> None:
        job.version = answer["committed"] or job.version
        if "error" in answer:
            self.end_job(job, refusal_of(answer))
            return
        self._ended = ""
        self.state.end(answer["version"], job.version)
        finished = pb.TrainFinished(version=answer["version"], steps=job.steps)
        finished.duration.FromNanoseconds(int(answer["seconds"] * 1e9))
        job.tell(pb.TrainResponse(finished=finished))
        self.end_job(job, None)

    def _started(self, job: TrainJob, version: int) -> None:
        job.begun = True
        state = self.state.version
        of = f"the state of version {state}" if state else "an optimizer that starts over"
        logger.info("job %s begins on version %d with %s", job.id, version, of)
        job.tell(pb.TrainResponse(started=pb.TrainStarted(version=version, state_version=state)))


def _step(job: TrainJob, notice: dict[str, Any]) -> None:
    job.steps += 1
    step = pb.TrainStep(step=notice["step"], version=notice["version"])
    if notice["loss"] is not None:
        step.loss = notice["loss"]
    if notice["tokens"] is not None:
        step.tokens = notice["tokens"]
    job.version = notice["version"] or job.version
    job.tell(pb.TrainResponse(step=step))
