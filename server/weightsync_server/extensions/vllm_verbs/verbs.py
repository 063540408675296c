"""The verbs: which path does what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2

from weightsync.errors import invalid_request
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.extensions.vllm_verbs.weight_update import (
    PauseRequest,
    WeightUpdates,
    pause_options,
)
from weightsync_server.http import http_messages
from weightsync_server.http.http_calls import HttpCalls
from weightsync_server.http.http_messages import Verb, refuse_unknown
from weightsync_server.http.http_server import HttpReply, HttpRequest
from weightsync_server.rpc import CHECK_HEALTH, SERVING
from weightsync_server.usecases.methods import (
    ABORT_PUSH,
    APPLY_VERSION,
    BEGIN_PUSH,
    GET_ENGINE_LAYOUT,
    GET_STATUS,
)


class VllmVerbs:
    """Answers vLLM's verbs for `model`, the one model of this server; `verbs` are by path.

    A `weight_dir` must lie below one of `roots`, which are absolute.
    """

    def __init__(self, calls: HttpCalls, model: str, roots: Sequence[Path]) -> None:
        self._calls = calls
        self._pause = PauseRequest()
        self._updates = WeightUpdates(calls, model, roots)
        applies = (APPLY_VERSION,)
        pushes = (GET_ENGINE_LAYOUT, BEGIN_PUSH, PUSH_WEIGHTS, ABORT_PUSH, APPLY_VERSION)
        self.verbs = {
            "/health": Verb("GET", (CHECK_HEALTH, GET_STATUS), self._health),
            "/is_paused": Verb("GET", (GET_STATUS,), self._is_paused),
            "/pause": Verb("POST", applies, self._pause_next),
            "/resume": Verb("POST", applies, self._resume),
            "/update_weights": Verb("POST", pushes, self._update_weights, is_long=True),
        }

    async def close(self, grace_s: float) -> None:
        """Give an update under way so many seconds to end, then end it."""
        await self._updates.close(grace_s)

    async def _health(self, request: HttpRequest, _: Mapping[str, Any]) -> HttpReply:
        ask = health_pb2.HealthCheckRequest(service=SERVING)
        health = await self._calls.call(CHECK_HEALTH, ask, request)
        if health.status == health_pb2.HealthCheckResponse.SERVING:
            return http_messages.answered({"status": "serving"})
        engine = await self._engine(request)
        document = {"status": "not serving", "error": engine.reason or "the engine is not ready"}
        return http_messages.answered(document, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _is_paused(self, request: HttpRequest, _: Mapping[str, Any]) -> HttpReply:
        engine = await self._engine(request)
        serves = engine.state in (pb.ENGINE_STATE_SERVING, pb.ENGINE_STATE_APPLYING)
        return http_messages.answered({"is_paused": not serves})

    async def _pause_next(self, _: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        options, seconds = pause_options(fields)
        self._pause.keep(options, seconds)
        return http_messages.answered(
            {
                "status": "deferred",
                "is_paused": False,
                "timeout_s": seconds,
                "message": "generation continues while /update_weights stages the weights, and "
                "pauses in this way only during the switch",
            }
        )

    async def _resume(self, _: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        refuse_unknown(fields, ())
        self._pause.drop()
        return http_messages.answered({"status": "resumed", "is_paused": False})

    async def _update_weights(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        refuse_unknown(fields, ("weight_dir",))
        path = fields.get("weight_dir")
        if not isinstance(path, str) or not path:
            raise invalid_request("weight_dir must name the folder of the checkpoint, as text")
        done = await self._updates.run(path, self._pause.current(), request)
        return http_messages.answered(done)

    async def _engine(self, request: HttpRequest) -> pb.EngineStatus:
        status = await self._calls.call(GET_STATUS, pb.GetStatusRequest(), request)
        engine: pb.EngineStatus = status.models[0].engine
        return engine
