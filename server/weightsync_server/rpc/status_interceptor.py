"""gRPC's calls through the guard: what it refuses becomes the status of the call."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import to_status
from weightsync_server.auth.caller import host_of
from weightsync_server.usecases.guard import CallGuard, Method, let_go

#: What makes a handler, by whether requests and responses are streams.
HANDLER_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

_RETRY_AFTER_S = 1.0


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Turns refusals into rich statuses.

    `reader_timeout_s` is what a reader may take for one message of a stream.
    """

    def __init__(self, guard: CallGuard, reader_timeout_s: float = 10.0) -> None:
        self._guard = guard
        self._reader_timeout_s = reader_timeout_s

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        _, service, name = f"/{handler_call_details.method.lstrip('/')}".split("/", 2)
        streams = bool(handler.request_streaming), bool(handler.response_streaming)
        call = GuardedCall(self._guard, Method(service, name, *streams), self._reader_timeout_s)
        return call.handler(handler)


class GuardedCall:
    """How the calls of one method are served; a message that takes longer to go is the last."""

    def __init__(self, guard: CallGuard, method: Method, reader_timeout_s: float) -> None:
        self._guard = guard
        self._method = method
        self._reader_timeout_s = reader_timeout_s

    def handler(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        inner: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        serve = self.unary
        if self._method.gets_stream:
            serve = self.stream if inspect.isasyncgenfunction(inner) else self.writer

        async def serving(request: Any, context: Any) -> Any:
            return await serve(inner, request, context)

        make: Any = HANDLER_MAKERS[self._method.sends_stream, self._method.gets_stream]
        made: grpc.RpcMethodHandler[Any, Any] = make(
            serving, handler.request_deserializer, handler.response_serializer
        )
        return made

    async def unary(self, inner: Any, request: Any, context: Any) -> Any:
        with self._guard.bounded(self._method, context.time_remaining()):
            try:
                with self._counted(context):
                    return await inner(request, context)
            except WeightSyncError as error:
                await _abort(error, context)

    async def stream(self, inner: Any, request: Any, context: Any) -> None:
        with self._guard.bounded(self._method, context.time_remaining()):
            try:
                # Closed before a refusal is sent, which may wait for the reader: a slot is not
                # held.
                with self._counted(context):
                    async with contextlib.aclosing(inner(request, context)) as messages:
                        async for message in messages:
                            await self._write(context, message)
            except WeightSyncError as error:
                await _abort(error, context)

    async def writer(self, inner: Any, request: Any, context: Any) -> None:
        """Serve a call whose method writes to its context, as health.Watch does."""
        try:
            with self._guard.limited(self._method, _name(context)):
                await inner(request, context)
        except WeightSyncError as error:
            await _abort(error, context)

    @contextlib.contextmanager
    def _counted(self, context: Any) -> Iterator[None]:
        with self._guard.counted(self._method, _name(context), context.code):
            try:
                yield
            except grpc.aio.UsageError:
                if not context.cancelled():
                    raise
                # The caller left between two messages.
                raise asyncio.CancelledError from None

    async def _write(self, context: Any, message: Any) -> None:
        try:
            async with asyncio.timeout(self._reader_timeout_s):
                await context.write(message)
        except grpc.aio.InternalError:
            # A message cannot be sent only where the caller has left, before the call knows it.
            raise asyncio.CancelledError from None
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"the reader took no message for {self._reader_timeout_s:g} s; call "
                f"{self._method.name} again and read faster, or raise reader_timeout_s",
                retry_after_s=_RETRY_AFTER_S,
            ) from None


def _name(context: Any) -> str:
    """Return whose call it is; where authority has not been asked, its host."""
    caller = getattr(context, "caller", None)
    return caller.name if caller is not None else host_of(context.peer())


async def _abort(error: WeightSyncError, context: Any) -> None:
    status = to_status(error)
    let_go(error)
    await context.abort_with_status(status)
