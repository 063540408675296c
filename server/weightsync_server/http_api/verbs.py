"""The verbs: which path does what, and who may have it done."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.auth.auth_interceptor import rule_for
from weightsync_server.auth.caller import RejectedCall
from weightsync_server.http_api import http_replies as replies
from weightsync_server.http_api.inner_calls import (
    ABORT_PUSH,
    APPLY_VERSION,
    BEGIN_PUSH,
    CHECK_HEALTH,
    GET_ENGINE_LAYOUT,
    GET_STATUS,
    HttpContext,
)
from weightsync_server.http_api.pause_request import PauseRequest, pause_options
from weightsync_server.http_api.request_fields import (
    BODY_BYTES,
    Verb,
    read_fields,
    refuse_unknown,
    refused,
)
from weightsync_server.http_api.train_verbs import TrainVerbs
from weightsync_server.http_api.weight_update import WeightUpdates
from weightsync_server.ops.http_endpoint import HttpEndpoint, HttpReply
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.rpc import SERVING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from weightsync_server.auth.auth_interceptor import AuthorityInterceptor
    from weightsync_server.http_api.inner_calls import InnerCalls
    from weightsync_server.ops.http_endpoint import HttpRequest

__all__ = ["HttpApi"]

logger = logging.getLogger(__name__)

#: Seconds for the last answers when the server stops.
_LAST_S = 5.0


class HttpApi:
    """Answers vLLM's verbs, and those of training, for the one model of this server.

    Args:
        calls: The server's methods.
        door: Knows who calls, the model and the audit; the first interceptor of `calls`.
        roots: Folders below which a `weight_dir` must lie, absolute.
        on_fault: Called for each fault.
    """

    def __init__(
        self,
        calls: InnerCalls,
        door: AuthorityInterceptor,
        roots: Sequence[Path],
        on_fault: Callable[[], None],
    ) -> None:
        self._calls = calls
        self._door = door
        self._on_fault = on_fault
        self._endpoint: HttpEndpoint | None = None
        self._pause = PauseRequest()
        self._updates = WeightUpdates(calls, door.model, roots)
        applies = (APPLY_VERSION,)
        pushes = (GET_ENGINE_LAYOUT, BEGIN_PUSH, PUSH_WEIGHTS, ABORT_PUSH, APPLY_VERSION)
        self._verbs = {
            "/health": Verb("GET", (CHECK_HEALTH, GET_STATUS), self._health),
            "/is_paused": Verb("GET", (GET_STATUS,), self._is_paused),
            "/pause": Verb("POST", applies, self._pause_next),
            "/resume": Verb("POST", applies, self._resume),
            "/update_weights": Verb("POST", pushes, self._update_weights, is_long=True),
            **TrainVerbs(calls, door.model).verbs,
        }

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Return the answer to a request, whatever is wrong with it."""
        try:
            return await self._answer(request)
        except WeightSyncError as error:
            return replies.refusal(error)
        except Exception as error:
            logger.exception("%s failed", request.path[:64])
            refusal = to_refusal(error, request.path[:64])
            if refusal.reason is Reason.FAULT:
                self._on_fault()
            return replies.refusal(refusal)

    def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Answer requests to an address from now on; returns its port.

        Args:
            host: Address to bind.
            port: 0: any free one.
            tls: What connections are encrypted with; None: they are not.

        Raises:
            OSError: The address cannot be bound.
        """
        self._endpoint = HttpEndpoint(
            self.answer,
            host,
            port,
            name="http-api",
            max_body=self._most_bytes,
            refuse=self._refuse_body,
            is_long=self._is_long,
            tls=tls,
        )
        return self._endpoint.port

    async def drain(self, grace_s: float) -> None:
        """Let nobody in any more; an update under way gets so many seconds, then it ends."""
        if self._endpoint is not None:
            self._endpoint.close()
        await self._updates.close(grace_s)
        if self._endpoint is not None:
            await self._endpoint.drain(min(grace_s, _LAST_S))

    async def _answer(self, request: HttpRequest) -> HttpReply:
        verb = self._find_verb(request)
        if isinstance(verb, HttpReply):
            return verb
        return await verb.run(request, read_fields(request, may_be_empty=verb.may_be_empty))

    def _find_verb(self, request: HttpRequest) -> Verb | HttpReply:
        """Return what a request is for, by its head alone, or that there is no such thing."""
        verb = self._verbs.get(request.path)
        if request.values("origin"):
            # A page of any site may have a browser on this host post to a port of this host.
            raise WeightSyncError(
                Reason.PERMISSION_DENIED, "browsers are not answered; ask without an Origin header"
            )
        self._admit(request, verb.needs if verb is not None else ())
        if verb is None:
            return replies.no_route(self._verbs)
        if request.method != verb.method and (request.method, verb.method) != ("HEAD", "GET"):
            return replies.no_method(request.path, verb.method)
        return verb

    def _refuse_body(self, head: HttpRequest, status: HTTPStatus, sentence: str) -> HttpReply:
        """Return the answer to a body that is not read: what is wrong with its head comes first."""
        try:
            found = self._find_verb(head)
        except WeightSyncError as error:
            return replies.refusal(error)
        return found if isinstance(found, HttpReply) else replies.wrong_request(status, sentence)

    def _most_bytes(self, head: HttpRequest) -> int:
        """Return how long the body after a head may be; strangers have no large ones read."""
        verb = self._verbs.get(head.path)
        if verb is None or verb.body_bytes <= BODY_BYTES:
            return BODY_BYTES
        try:
            self._door.gate.identify(HttpContext(head))
        except WeightSyncError:
            return BODY_BYTES
        return verb.body_bytes

    def _is_long(self, request: HttpRequest) -> bool:
        verb = self._verbs.get(request.path)
        return verb is not None and verb.is_long

    def _admit(self, request: HttpRequest, needs: Sequence[str]) -> None:
        """Refuse who may not do all of it: half of a verb is done for nobody."""
        who = ""
        try:
            principal = self._door.gate.identify(HttpContext(request))
            who = principal.name
            for method in needs:
                rule_for(principal, method, self._door.model)
        except WeightSyncError as error:
            attempt = RejectedCall(who, request.path.rpartition("/")[2][:64], request.peer)
            self._door.audit.refuse(error, attempt)
            raise

    async def _health(self, request: HttpRequest, _: Mapping[str, Any]) -> HttpReply:
        ask = health_pb2.HealthCheckRequest(service=SERVING)
        health = await self._calls.call(CHECK_HEALTH, ask, request)
        if health.status == health_pb2.HealthCheckResponse.SERVING:
            return replies.answered({"status": "serving"})
        engine = await self._engine(request)
        document = {"status": "not serving", "error": engine.reason or "the engine is not ready"}
        return replies.answered(document, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _is_paused(self, request: HttpRequest, _: Mapping[str, Any]) -> HttpReply:
        engine = await self._engine(request)
        serves = engine.state in (pb.ENGINE_STATE_SERVING, pb.ENGINE_STATE_APPLYING)
        return replies.answered({"is_paused": not serves})

    async def _pause_next(self, _: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        options, seconds = pause_options(fields)
        self._pause.keep(options, seconds)
        return replies.answered(
            {
                "status": "deferred",
                "is_paused": False,
                "timeout_s": seconds,
                "message": "generation goes on while /update_weights stages the weights, and is "
                "stopped in this way for the moment of the exchange only",
            }
        )

    async def _resume(self, _: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        refuse_unknown(fields, ())
        self._pause.drop()
        return replies.answered({"status": "resumed", "is_paused": False})

    async def _update_weights(self, request: HttpRequest, fields: Mapping[str, Any]) -> HttpReply:
        refuse_unknown(fields, ("weight_dir",))
        path = fields.get("weight_dir")
        if not isinstance(path, str) or not path:
            raise refused("weight_dir must name the folder of the checkpoint, as text")
        done = await self._updates.run(path, self._pause.current(), request)
        return replies.answered(done)

    async def _engine(self, request: HttpRequest) -> pb.EngineStatus:
        status = await self._calls.call(GET_STATUS, pb.GetStatusRequest(), request)
        engine: pb.EngineStatus = status.models[0].engine
        return engine
