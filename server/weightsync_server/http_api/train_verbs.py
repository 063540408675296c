"""/v1/weightsync/...: the trainer that this server supervises, over HTTP."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from weightsync.v1 import train_pb2 as pb
from weightsync.wire.json_struct import to_struct
from weightsync_server.http_api import http_replies as replies
from weightsync_server.http_api.event_stream import EventStream
from weightsync_server.http_api.inner_calls import (
    CANCEL_TRAIN,
    CHECKPOINT,
    GET_TRAIN_STATUS,
    TRAIN,
)
from weightsync_server.http_api.request_fields import Verb, refuse_unknown, refused
from weightsync_server.ops.http_endpoint import HttpReply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync_server.http_api.inner_calls import InnerCalls
    from weightsync_server.ops.http_endpoint import HttpRequest

__all__ = ["TrainVerbs"]

#: Bytes of a request: the texts that are trained on are in it.
_REQUEST_BYTES = 1 << 20
_HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))


class TrainVerbs:
    """Gives the trainer what comes over HTTP.

    Args:
        calls: The server's methods.
        model: Name of the model.

    Attributes:
        verbs: By path.
    """

    def __init__(self, calls: InnerCalls, model: str) -> None:
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
            raise refused("what the trainer is given is the body; leave the query out")
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
        return replies.answered(_status(await self._calls.call(GET_TRAIN_STATUS, ask, request)))

    async def _cancel(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        ask = pb.CancelTrainRequest(model=self._model, job_id=_text(fields, "job_id"))
        await self._calls.call(CANCEL_TRAIN, ask, request)
        return replies.answered({"job_id": ask.job_id})

    async def _checkpoint(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        folder = _text(fields, "folder") if fields else ""
        ask = pb.CheckpointRequest(model=self._model, folder=folder)
        done = await self._calls.call(CHECKPOINT, ask, request)
        document = {"version": done.version, "path": done.path, "missing": done.missing}
        return replies.answered(document)


def _text(fields: Mapping[str, Any], name: str) -> str:
    """Return the one field there may be."""
    refuse_unknown(fields, (name,))
    value = fields.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise refused(f"{name} must be given, as text")
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
