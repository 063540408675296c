"""The calls about the trainer that a server supervises, and what they return."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from weightsync.v1 import train_pb2 as pb
from weightsync.v1 import train_pb2_grpc
from weightsync.wire.json_struct import to_struct
from weightsync_client.errors import invalid, typed_errors
from weightsync_client.rpc.calls import Call
from weightsync_client.rpc.convert import from_message
from weightsync_client.rpc.validate import seconds, text

if TYPE_CHECKING:
    from weightsync_client.options import Timeouts


class TrainEvent(enum.StrEnum):
    """What happened to a job: it waits, the trainer has taken it, it did a step, it ended well."""

    UNSPECIFIED = enum.auto()
    QUEUED = enum.auto()
    STARTED = enum.auto()
    STEP = enum.auto()
    FINISHED = enum.auto()


class TrainerState(enum.StrEnum):
    """Where the trainer's process stands."""

    UNSPECIFIED = enum.auto()
    STARTING = enum.auto()
    READY = enum.auto()
    TRAINING = enum.auto()
    AWAY = enum.auto()


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """An event of a job; what does not belong to the event is 0 or None.

    Attributes:
        job_id: Names the job.
        event: What happened.
        version: STARTED: the live version that it begins on. STEP: the version that is live since
            this step; 0: it has committed none. FINISHED: the version that is live after it.
        ahead: QUEUED: jobs before it, the one that runs included.
        state_version: STARTED: the version whose state the optimizer has; 0: it was started over.
        step: STEP: its number in the job. FINISHED: how many there were.
        loss: STEP: its loss, if it has one.
        tokens: STEP: how many it was trained on, if known.
        duration_s: FINISHED: how long it ran, seconds.
    """

    job_id: str
    event: TrainEvent
    version: int = 0
    ahead: int = 0
    state_version: int = 0
    step: int = 0
    loss: float | None = None
    tokens: int | None = None
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """A durable version.

    Attributes:
        version: Its number.
        path: Folder that was written, on the server's host; empty: none was asked for.
        missing: What a vLLM that loads the folder needs and does not find in it, such as
            config.json, one sentence; empty: nothing.
    """

    version: int
    path: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TrainStatus:
    """What the trainer does.

    Attributes:
        state: Where its process stands.
        reason: Why it is not ready, or why its last process ended; empty: nothing is wrong.
        pid: Its process; 0: there is none.
        restarts: Times that it was restarted.
        running_job_id: The job that runs; empty: none.
        running_steps: Steps that it has done.
        queued_job_ids: Jobs that wait, the next one first.
        finished: Jobs that ended well, since the server started.
        failed: Jobs that failed.
        cancelled: Jobs that were cancelled.
        state_version: The version whose state the optimizer has; 0: it was begun anew.
    """

    state: TrainerState
    reason: str
    pid: int
    restarts: int
    running_job_id: str
    running_steps: int
    queued_job_ids: tuple[str, ...]
    finished: int
    failed: int
    cancelled: int
    state_version: int


_STUB = train_pb2_grpc.TrainServiceStub


def train_call(
    model: str, request: Mapping[str, Any], timeout_s: float | None, timeouts: Timeouts
) -> Call[TrainProgress]:
    """Give the trainer a job; what is read is one of the messages that arrive."""
    if not isinstance(request, Mapping):
        raise invalid("the request is not a mapping of names to values")
    with typed_errors():
        message = pb.TrainRequest(model=model, request=to_struct("the request", request))
    return Call("Train", message, _longest(timeout_s, timeouts), to_progress, _STUB)


def checkpoint_call(
    model: str, folder: str | None, timeout_s: float | None, timeouts: Timeouts
) -> Call[CheckpointResult]:
    """Ask for a durable version."""
    request = pb.CheckpointRequest(model=model, folder=text("folder", folder or ""))
    return Call(
        "Checkpoint",
        request,
        _longest(timeout_s, timeouts),
        partial(from_message, CheckpointResult),
        _STUB,
    )


def train_status_call(model: str, timeouts: Timeouts) -> Call[TrainStatus]:
    """Ask what the trainer does."""
    request = pb.GetTrainStatusRequest(model=model)
    return Call(
        "GetTrainStatus", request, timeouts.call_s, partial(from_message, TrainStatus), _STUB
    )


def cancel_train_call(model: str, job_id: str, timeouts: Timeouts) -> Call[None]:
    """End a job."""
    request = pb.CancelTrainRequest(model=model, job_id=text("job_id", job_id))
    return Call("CancelTrain", request, timeouts.call_s, lambda _: None, _STUB)


def to_progress(m: pb.TrainResponse) -> TrainProgress:
    """Convert an event of a job."""
    event = m.WhichOneof("event")
    match event:
        case "queued":
            return TrainProgress(m.job_id, TrainEvent.QUEUED, ahead=m.queued.ahead)
        case "started":
            version, state = m.started.version, m.started.state_version
            started = TrainEvent.STARTED
            return TrainProgress(m.job_id, started, version, state_version=state)
        case "step":
            return _step(m.job_id, m.step)
        case "finished":
            return TrainProgress(
                m.job_id,
                TrainEvent.FINISHED,
                m.finished.version,
                step=m.finished.steps,
                duration_s=m.finished.duration.ToNanoseconds() / 1e9,
            )
    # Of a newer server.
    return TrainProgress(m.job_id, TrainEvent.UNSPECIFIED)


def _step(job_id: str, m: pb.TrainStep) -> TrainProgress:
    return TrainProgress(
        job_id,
        TrainEvent.STEP,
        m.version,
        step=m.step,
        loss=m.loss if m.HasField("loss") else None,
        tokens=m.tokens if m.HasField("tokens") else None,
    )


def _longest(timeout_s: float | None, timeouts: Timeouts) -> float:
    return seconds("timeout_s", timeouts.train_s if timeout_s is None else timeout_s)
