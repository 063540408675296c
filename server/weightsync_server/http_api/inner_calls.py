"""The server's own methods, called for an HTTP request as if its sender had called them by gRPC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.ops.call_context import CallContext
from weightsync_server.ops.method_handlers import through

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from weightsync.v1 import weightsync_pb2_grpc
    from weightsync_server.ops.http_endpoint import HttpRequest
    from weightsync_server.rpc import HealthServicer

__all__ = [
    "ABORT_PUSH",
    "APPLY_VERSION",
    "BEGIN_PUSH",
    "CHECK_HEALTH",
    "GET_STATUS",
    "HttpContext",
    "InnerCalls",
]

_OURS = pb.DESCRIPTOR.services_by_name["WeightSync"].full_name
BEGIN_PUSH, ABORT_PUSH = f"/{_OURS}/BeginPush", f"/{_OURS}/AbortPush"
APPLY_VERSION, GET_STATUS = f"/{_OURS}/ApplyVersion", f"/{_OURS}/GetStatus"
CHECK_HEALTH = f"/{HEALTH}/Check"

#: Kinds of alternative names in a certificate, as `ssl` calls them, that gRPC tells as well.
_NAMES = ("DNS", "URI", "IP Address", "email")


class HttpContext(CallContext):
    """Who sent an HTTP request, as gRPC's context tells it of a call.

    Args:
        request: The request.
    """

    def __init__(self, request: HttpRequest) -> None:
        super().__init__(request.peer)
        self._request = request

    def invocation_metadata(self) -> Iterable[tuple[str, str]]:
        """Return the headers that prove who calls."""
        return [("authorization", value) for value in self._request.values("authorization")]

    def auth_context(self) -> dict[str, Sequence[bytes]]:
        """Return the names in the client's certificate, which TLS has verified."""
        certificate = self._request.certificate
        alternatives = certificate.get("subjectAltName", ())
        subject = [pair for part in certificate.get("subject", ()) for pair in part]
        return {
            "x509_subject_alternative_name": [
                value.encode() for kind, value in alternatives if kind in _NAMES
            ],
            "x509_common_name": [value.encode() for kind, value in subject if kind == "commonName"],
        }


class InnerCalls:
    """Calls methods of this server through every interceptor of its gRPC servers.

    Args:
        servicer: Has the methods.
        health: The standard health service.
        interceptors: As those of a gRPC server: the first asks for authority.
    """

    def __init__(
        self,
        servicer: weightsync_pb2_grpc.WeightSyncServicer,
        health: HealthServicer,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        self._interceptors = interceptors
        unary: Any = grpc.unary_unary_rpc_method_handler
        streaming: Any = grpc.stream_unary_rpc_method_handler
        self._handlers = {
            BEGIN_PUSH: unary(servicer.BeginPush),
            ABORT_PUSH: unary(servicer.AbortPush),
            APPLY_VERSION: unary(servicer.ApplyVersion),
            GET_STATUS: unary(servicer.GetStatus),
            CHECK_HEALTH: unary(health.Check),
            PUSH_WEIGHTS: streaming(servicer.PushWeights),
        }

    async def call(self, method: str, message: Any, sender: HttpRequest) -> Any:
        """Return what a method of one response answers.

        Args:
            method: Its exact path.
            message: The request, or the async generator of them.
            sender: Proves who calls.

        Raises:
            WeightSyncError: The method, or who watches over it, refused the call.
        """
        context = HttpContext(sender)
        handler = await through(self._interceptors, self._handlers[method], method)
        messages = message if hasattr(message, "__anext__") else _one(message)
        try:
            # A task of its own, as a call of gRPC has: what is known of its caller stays there.
            return await asyncio.create_task(handler.stream_unary(messages, context))
        except grpc.aio.AbortError:
            raise (
                from_call(context) or WeightSyncError(Reason.FAULT, "the call failed; see the log")
            ) from None


async def _one(message: Any) -> AsyncIterator[Any]:
    yield message
