"""The calls about the trainer that a server supervises, as data; see `calls`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync.v1 import train_pb2 as pb
from weightsync.v1 import train_pb2_grpc
from weightsync.wire.json_struct import to_struct
from weightsync_client import train_types as types
from weightsync_client.errors import refuse, typed_errors
from weightsync_client.rpc.calls import Call
from weightsync_client.rpc.validate import seconds, text

if TYPE_CHECKING:
    from weightsync_client.options import Timeouts

__all__ = ["cancel_train", "checkpoint", "to_progress", "train", "train_status"]

_STUB = train_pb2_grpc.TrainServiceStub


def train(
    model: str, request: Mapping[str, Any], timeout_s: float | None, timeouts: Timeouts
) -> Call[types.TrainProgress]:
    """Give the trainer a job; what is read is one of the messages that come."""
    if not isinstance(request, Mapping):
        raise refuse(Reason.REQUEST_INVALID, "the request is no mapping of names to values")
    with typed_errors():
        message = pb.TrainRequest(model=model, request=to_struct("the request", request))
    return Call("Train", message, _longest(timeout_s, timeouts), to_progress, _STUB)


def checkpoint(
    model: str, folder: str | None, timeout_s: float | None, timeouts: Timeouts
) -> Call[types.CheckpointResult]:
    """Ask for a durable version."""
    request = pb.CheckpointRequest(model=model, folder=text("folder", folder or ""))
    return Call(
        "Checkpoint",
        request,
        _longest(timeout_s, timeouts),
        lambda m: types.CheckpointResult(m.version, m.path, m.missing),
        _STUB,
    )


def train_status(model: str, timeouts: Timeouts) -> Call[types.TrainStatus]:
    """Ask what the trainer does."""
    request = pb.GetTrainStatusRequest(model=model)
    return Call("GetTrainStatus", request, timeouts.call_s, _status, _STUB)


def cancel_train(model: str, job_id: str, timeouts: Timeouts) -> Call[None]:
    """End a job."""
    request = pb.CancelTrainRequest(model=model, job_id=text("job_id", job_id))
    return Call("CancelTrain", request, timeouts.call_s, lambda _: None, _STUB)


def to_progress(m: pb.TrainResponse) -> types.TrainProgress:
    """Convert what a job has come to."""
    event = m.WhichOneof("event")
    match event:
        case "queued":
            return types.TrainProgress(m.job_id, types.TrainEvent.QUEUED, ahead=m.queued.ahead)
        case "started":
            version, state = m.started.version, m.started.state_version
            started = types.TrainEvent.STARTED
            return types.TrainProgress(m.job_id, started, version, state_version=state)
        case "step":
            return _step(m.job_id, m.step)
        case "finished":
            return types.TrainProgress(
                m.job_id,
                types.TrainEvent.FINISHED,
                m.finished.version,
                step=m.finished.steps,
                duration_s=m.finished.duration.ToNanoseconds() / 1e9,
            )
    # Of a newer server.
    return types.TrainProgress(m.job_id, types.TrainEvent.UNSPECIFIED)


def _step(job_id: str, m: pb.TrainStep) -> types.TrainProgress:
    return types.TrainProgress(
        job_id,
        types.TrainEvent.STEP,
        m.version,
        step=m.step,
        loss=m.loss if m.HasField("loss") else None,
        tokens=m.tokens if m.HasField("tokens") else None,
    )


def _status(m: pb.GetTrainStatusResponse) -> types.TrainStatus:
    return types.TrainStatus(
        state=_state(m.state),
        reason=m.reason,
        pid=m.pid,
        restarts=m.restarts,
        running_job_id=m.running_job_id,
        running_steps=m.running_steps,
        queued_job_ids=tuple(m.queued_job_ids),
        finished=m.finished,
        failed=m.failed,
        cancelled=m.cancelled,
        state_version=m.state_version,
    )


def _state(value: int) -> types.TrainerState:
    # A value of a newer server has no name here.
    try:
        name = pb.TrainerState.Name(value)  # type: ignore[arg-type]  # of any number
        return types.TrainerState(name.removeprefix("TRAINER_STATE_").lower())
    except ValueError:
        return types.TrainerState.UNSPECIFIED


def _longest(timeout_s: float | None, timeouts: Timeouts) -> float:
    return seconds("timeout_s", timeouts.train_s if timeout_s is None else timeout_s)
