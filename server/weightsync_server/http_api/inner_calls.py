"""The server's own methods, called for an HTTP request as if its sender had called them by gRPC."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import train_pb2
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call
from weightsync_server.auth import PUSH_WEIGHTS
from weightsync_server.ops.call_context import CallContext
from weightsync_server.ops.method_handlers import through

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

    from weightsync.v1 import train_pb2_grpc, weightsync_pb2_grpc
    from weightsync_server.ops.http_endpoint import HttpRequest
    from weightsync_server.rpc import HealthServicer

__all__ = [
    "ABORT_PUSH",
    "APPLY_VERSION",
    "BEGIN_PUSH",
    "CANCEL_TRAIN",
    "CHECKPOINT",
    "CHECK_HEALTH",
    "GET_ENGINE_LAYOUT",
    "GET_STATUS",
    "GET_TRAIN_STATUS",
    "TRAIN",
    "HttpContext",
    "InnerCalls",
]

_OURS = pb.DESCRIPTOR.services_by_name["WeightSync"].full_name
BEGIN_PUSH, ABORT_PUSH = f"/{_OURS}/BeginPush", f"/{_OURS}/AbortPush"
APPLY_VERSION, GET_STATUS = f"/{_OURS}/ApplyVersion", f"/{_OURS}/GetStatus"
GET_ENGINE_LAYOUT = f"/{_OURS}/GetEngineLayout"
CHECK_HEALTH = f"/{HEALTH}/Check"
_TRAINER = train_pb2.DESCRIPTOR.services_by_name["TrainService"].full_name
TRAIN, CANCEL_TRAIN = f"/{_TRAINER}/Train", f"/{_TRAINER}/CancelTrain"
CHECKPOINT, GET_TRAIN_STATUS = f"/{_TRAINER}/Checkpoint", f"/{_TRAINER}/GetTrainStatus"

#: Headers that authority asks for.
_PROOFS = ("authorization", "forwarded")
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
        """Return the headers that prove who calls, or that somebody else does."""
        return [(name, value) for name in _PROOFS for value in self._request.values(name)]

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


class _StreamContext(HttpContext):
    """Of a call that answers with a stream.

    Args:
        request: The request.

    Attributes:
        responses: What the method has answered, and None at its end.
    """

    def __init__(self, request: HttpRequest) -> None:
        super().__init__(request)
        self.responses: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, response: Any) -> None:
        """Return when a response was taken; as gRPC does, which waits for its reader."""
        self.responses.put_nowait(response)
        await self.responses.join()


class InnerCalls:
    """Calls methods of this server through every interceptor of its gRPC servers.

    Args:
        servicer: Has the methods.
        health: The standard health service.
        trainer: The service of its trainer.
        interceptors: As those of a gRPC server: the first asks for authority.
    """

    def __init__(
        self,
        servicer: weightsync_pb2_grpc.WeightSyncServicer,
        health: HealthServicer,
        trainer: train_pb2_grpc.TrainServiceServicer,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        self._interceptors = interceptors
        unary: Any = grpc.unary_unary_rpc_method_handler
        streaming: Any = grpc.stream_unary_rpc_method_handler
        self._handlers = {
            BEGIN_PUSH: unary(servicer.BeginPush),
            ABORT_PUSH: unary(servicer.AbortPush),
            APPLY_VERSION: unary(servicer.ApplyVersion),
            GET_ENGINE_LAYOUT: unary(servicer.GetEngineLayout),
            GET_STATUS: unary(servicer.GetStatus),
            CHECK_HEALTH: unary(health.Check),
            PUSH_WEIGHTS: streaming(servicer.PushWeights),
            TRAIN: grpc.unary_stream_rpc_method_handler(trainer.Train),
            CHECKPOINT: unary(trainer.Checkpoint),
            GET_TRAIN_STATUS: unary(trainer.GetTrainStatus),
            CANCEL_TRAIN: unary(trainer.CancelTrain),
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
            raise _failure(context) from None

    async def stream(
        self, method: str, message: Any, sender: HttpRequest
    ) -> AsyncGenerator[Any, None]:
        """Yield what a method of several responses answers; closing this cancels the call.

        Args:
            method: Its exact path.
            message: The request.
            sender: Proves who calls.

        Raises:
            WeightSyncError: The method, or who watches over it, refused the call or failed.
        """
        context = _StreamContext(sender)
        handler = await through(self._interceptors, self._handlers[method], method)
        task = asyncio.create_task(handler.stream_stream(_one(message), context))
        task.add_done_callback(lambda _: context.responses.put_nowait(None))
        try:
            while (response := await context.responses.get()) is not None:
                yield response
                context.responses.task_done()
            if task.cancelled():
                raise WeightSyncError(
                    Reason.SHUTTING_DOWN, "the server has ended the call; call again later"
                )
            task.result()
        except grpc.aio.AbortError:
            raise _failure(context) from None
        finally:
            task.cancel()
            await asyncio.wait([task])


def _failure(context: HttpContext) -> WeightSyncError:
    return from_call(context) or WeightSyncError(Reason.FAULT, "the call failed; see the log")


async def _one(message: Any) -> AsyncIterator[Any]:
    yield message
