"""What callers can have done by the trainer: over gRPC, and over HTTP: /v1/weightsync/..."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.v1 import train_pb2 as pb
from weightsync.wire.json_struct import from_struct, to_struct
from weightsync_server.catalog.table import check_model
from weightsync_server.extensions.trainer.train_job import TrainJob, cancelled_job
from weightsync_server.extensions.trainer.train_state import StateFolders
from weightsync_server.extensions.trainer.trainer_pool import (
    TrainedEngine,
    TrainerPool,
    TrainMetrics,
)
from weightsync_server.extensions.trainer.trainer_settings import TrainerSettings
from weightsync_server.http import http_messages
from weightsync_server.http.extension_points import ExtensionHome, ExtensionSettings
from weightsync_server.http.http_messages import EventStream, Verb, refuse_unknown
from weightsync_server.http.http_server import HttpReply, HttpRequest
from weightsync_server.ops.metrics import Metrics

if TYPE_CHECKING:
    from weightsync_server.auth import Caller
    from weightsync_server.auth.caller import UseCase
    from weightsync_server.engine import EngineSet
    from weightsync_server.http.http_calls import HttpCalls
    from weightsync_server.model import Model

#: A name, never a path: it begins with no dot, and has no slash.
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
#: Longest wait until a version that is live is durable, seconds.
_DURABLE_S = 600.0
#: When one more checkpoint may be asked for, seconds.
_RETRY_AFTER_S = 5.0


class Training:
    """The trainer of one server. `start`, then `stop`; every method belongs to the event loop."""

    def __init__(
        self,
        options: TrainerSettings,
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
        await self._folders.open()
        self._pool.start_later()

    async def stop(self, longest_s: float) -> None:
        """Cancel every job, give the one that runs at most `longest_s`, and end the trainer."""
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
        """Have a job wait for its turn; `request` is what the user's class is given."""
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
        """Return a job that waits or runs; JOB_UNKNOWN: it does neither."""
        running = self._pool.running
        job = running if running and running.id == job_id else self._pool.queue.find(job_id)
        if job is None:
            raise WeightSyncError(
                Reason.JOB_UNKNOWN,
                f"no job {job_id[:64]!r} is waiting or running; see GetTrainStatus for those "
                "that are",
            )
        return job

    async def checkpoint(self, folder: str) -> pb.CheckpointResponse:
        """Return when the live version is durable: which it is, and what its folder is like.

        `folder` is a name; "": no folder is wanted.
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
        below = self._options.checkpoint_dir
        if below is None:
            raise invalid_request(
                "start this server with --checkpoint-dir, or name no folder: without it, it "
                "writes none"
            )
        if not _FOLDER.fullmatch(folder):
            raise invalid_request(
                "folder must be a name of at most 128 letters, digits and . _ - that begins with "
                "none of . and -"
            )
        target = below.absolute() / folder
        if target.exists() or target.is_symlink():
            raise invalid_request(f"{target} already exists; name another folder")
        return target


_SERVICE = pb.DESCRIPTOR.services_by_name["TrainService"].full_name
TRAIN, CANCEL_TRAIN = f"/{_SERVICE}/Train", f"/{_SERVICE}/CancelTrain"
CHECKPOINT, GET_TRAIN_STATUS = f"/{_SERVICE}/Checkpoint", f"/{_SERVICE}/GetTrainStatus"


class TrainService:
    """The trainer as the app starts it, serves it and stops it; with None, it refuses all calls."""

    def __init__(self, model: str, training: Training | None) -> None:
        self._model = model
        self._training = training

    def use_cases(self) -> Mapping[str, UseCase]:
        return {
            TRAIN: self.train,
            CHECKPOINT: self.checkpoint,
            GET_TRAIN_STATUS: self.get_train_status,
            CANCEL_TRAIN: self.cancel_train,
        }

    def verbs(self, calls: HttpCalls, model: str) -> Mapping[str, Verb]:
        return TrainVerbs(calls, model).verbs

    async def start(self) -> None:
        if self._training is not None:
            await self._training.start()

    async def stop(self, longest_s: float) -> None:
        """End the trainer; a job under way gets so many seconds."""
        if self._training is not None:
            await self._training.stop(longest_s)

    async def train(self, _: Caller, request: pb.TrainRequest) -> AsyncIterator[pb.TrainResponse]:
        training = self._trainer(request.model)
        job = training.submit(from_struct(request.request))
        try:
            async for event in job.events():
                yield event
        finally:
            training.cancel(job)

    async def checkpoint(self, _: Caller, request: pb.CheckpointRequest) -> pb.CheckpointResponse:
        return await self._trainer(request.model).checkpoint(request.folder)

    async def get_train_status(
        self, _: Caller, request: pb.GetTrainStatusRequest
    ) -> pb.GetTrainStatusResponse:
        return self._trainer(request.model).status()

    async def cancel_train(
        self, _: Caller, request: pb.CancelTrainRequest
    ) -> pb.CancelTrainResponse:
        training = self._trainer(request.model)
        training.cancel(training.find(request.job_id))
        return pb.CancelTrainResponse()

    def _trainer(self, model: str) -> Training:
        check_model(model, self._model)
        if self._training is None:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                "this server supervises no trainer; start it with --trainer module:Class",
            )
        return self._training


def supervised_trainer(
    settings: Sequence[ExtensionSettings],
    home: ExtensionHome,
    engines: EngineSet,
    model: Model,
    metrics: Metrics,
) -> TrainService:
    """Return the service of the trainer; where none is set, there is none and calls are refused."""
    (own,) = (one for one in settings if isinstance(one, TrainerSettings))
    name = model.table.name
    if not own.trainer:
        return TrainService(name, None)
    (endpoint,) = own.endpoints(home.run_dir)
    options = replace(
        own,
        address=endpoint.address,
        states=(home.state_dir / "trainer").absolute(),
        model=name,
        identity=home.identity,
    )
    return TrainService(name, Training(options, engines, model, metrics))


#: Bytes of a request: the texts that are trained on are in it.
_REQUEST_BYTES = 1 << 20
_HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))


class TrainVerbs:
    """Gives the trainer what comes over HTTP; `calls` are the server's methods."""

    def __init__(self, calls: HttpCalls, model: str) -> None:
        self._calls = calls
        self._model = model
        root = "/v1/weightsync"
        self.verbs = {
            f"{root}/train": Verb(
                "POST", (TRAIN,), self._train, _REQUEST_BYTES, may_be_empty=False, is_long=True
            ),
            f"{root}/train/status": Verb("GET", (GET_TRAIN_STATUS,), self._status),
            f"{root}/train/cancel": Verb("POST", (CANCEL_TRAIN,), self._cancel),
            f"{root}/checkpoint": Verb("POST", (CHECKPOINT,), self._checkpoint, is_long=True),
        }

    async def _train(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        if request.query:
            raise invalid_request("leave the query out: the body is the request for the trainer")
        message = pb.TrainRequest(model=self._model, request=to_struct("the body", fields))
        progress = self._calls.stream(TRAIN, message, request)
        try:
            # What is refused is refused with a status of HTTP; nothing else is kept back.
            first = await anext(progress)
        except BaseException:
            await progress.aclose()
            raise
        stream = EventStream(first, progress, _progress)
        return HttpReply(HTTPStatus.OK, b"", "text/event-stream", _HEADERS, stream)

    async def _status(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        refuse_unknown(fields, ())
        ask = pb.GetTrainStatusRequest(model=self._model)
        return http_messages.answered(
            _status(await self._calls.call(GET_TRAIN_STATUS, ask, request))
        )

    async def _cancel(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        ask = pb.CancelTrainRequest(model=self._model, job_id=_text(fields, "job_id"))
        await self._calls.call(CANCEL_TRAIN, ask, request)
        return http_messages.answered({"job_id": ask.job_id})

    async def _checkpoint(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        folder = _text(fields, "folder") if fields else ""
        ask = pb.CheckpointRequest(model=self._model, folder=folder)
        done = await self._calls.call(CHECKPOINT, ask, request)
        document = {"version": done.version, "path": done.path, "missing": done.missing}
        return http_messages.answered(document)


def _text(fields: Mapping[str, Any], name: str) -> str:
    refuse_unknown(fields, (name,))
    value = fields.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise invalid_request(f"{name} must be given, as text")
    return value


def _progress(m: pb.TrainResponse) -> dict[str, Any]:
    event = m.WhichOneof("event")
    document: dict[str, Any] = {"event": event, "job_id": m.job_id}
    match event:
        case "queued":
            document["ahead"] = m.queued.ahead
        case "started":
            document["version"] = m.started.version
            document["state_version"] = m.started.state_version
        case "step":
            document |= _step(m.step)
        case "finished":
            done = m.finished
            duration_s = done.duration.ToNanoseconds() / 1e9
            document |= {"version": done.version, "steps": done.steps, "duration_s": duration_s}
    return document


def _step(m: pb.TrainStep) -> dict[str, Any]:
    document: dict[str, Any] = {"step": m.step, "version": m.version}
    if m.HasField("loss"):
        # JSON knows no other numbers.
        document["loss"] = m.loss if math.isfinite(m.loss) else None
    if m.HasField("tokens"):
        document["tokens"] = m.tokens
    return document


def _status(m: pb.GetTrainStatusResponse) -> dict[str, Any]:
    return {
        "state": pb.TrainerState.Name(m.state).removeprefix("TRAINER_STATE_").lower(),
        "reason": m.reason,
        "pid": m.pid,
        "restarts": m.restarts,
        "running_job_id": m.running_job_id,
        "running_steps": m.running_steps,
        "queued_job_ids": list(m.queued_job_ids),
        "finished": m.finished,
        "failed": m.failed,
        "cancelled": m.cancelled,
        "state_version": m.state_version,
    }
