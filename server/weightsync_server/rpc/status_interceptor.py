"""The one place where errors become gRPC statuses and calls become metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import to_status
from weightsync_server.ops.deadlines import DeadlineMonitor
from weightsync_server.ops.method_handlers import behavior_of, with_behavior
from weightsync_server.ops.os_errors import system_fault, to_refusal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from google.protobuf.descriptor import ServiceDescriptor

__all__ = ["GuardInterceptor", "RpcMetrics"]

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0

#: The ecosystem's names of calls, by whether requests and responses are streams.
_KINDS: Mapping[tuple[bool, bool], str] = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}


class RpcMetrics:
    """The ecosystem's metrics of RPCs (https://github.com/grpc-ecosystem/go-grpc-middleware)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["grpc_type", "grpc_service", "grpc_method"]
        self._started = Counter(
            "grpc_server_started_total", "RPCs started.", labels, registry=registry
        )
        self._handled = Counter(
            "grpc_server_handled_total", "RPCs ended.", [*labels, "grpc_code"], registry=registry
        )
        self._seconds = Histogram(
            "grpc_server_handling_seconds", "Time per RPC.", labels, registry=registry
        )

    def initialize(self, service: ServiceDescriptor) -> None:
        """Make every child of a service, so that a rate exists before the first failure."""
        for method in service.methods:
            streams = bool(method.client_streaming), bool(method.server_streaming)
            labels = (_KINDS[streams], service.full_name, method.name)
            self._started.labels(*labels)
            self._seconds.labels(*labels)
            for code in grpc.StatusCode:
                self._handled.labels(*labels, _camel(code))

    def start(self, kind: str, service: str, method: str) -> Callable[[grpc.StatusCode], None]:
        """Count a start; call the result with the status at the end."""
        self._started.labels(kind, service, method).inc()
        begin = time.perf_counter()

        def end(code: grpc.StatusCode) -> None:
            self._handled.labels(kind, service, method, _camel(code)).inc()
            self._seconds.labels(kind, service, method).observe(time.perf_counter() - begin)

        return end


def _camel(code: grpc.StatusCode) -> str:
    # grpc-go's names of codes, as dashboards of the ecosystem expect them: OK, NotFound, ...
    return "OK" if code is grpc.StatusCode.OK else code.name.title().replace("_", "")


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Turns WeightSyncError into a rich status, anything else into a logged, textless fault.

    What the operating system refused is told as such, and is no fault of the server.

    Args:
        metrics: Counts calls.
        on_fault: Called for each fault.
        reader_timeout_s: Seconds that a reader may take for one message of a stream.
        bounds: Told of every call that has a deadline.
    """

    def __init__(
        self,
        metrics: RpcMetrics,
        on_fault: Callable[[], None],
        reader_timeout_s: float = 10.0,
        bounds: DeadlineMonitor | None = None,
    ) -> None:
        self._bounds = bounds or DeadlineMonitor()
        self._metrics = metrics
        self._on_fault = on_fault
        self._reader_timeout_s = reader_timeout_s

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of every method."""
        handler = await continuation(handler_call_details)
        if handler is None or _writes_itself(handler):
            return handler
        _, service, method = f"/{handler_call_details.method.lstrip('/')}".split("/", 2)
        return _wrap(handler, self._guard(_kind(handler), service, method))

    def _guard(self, kind: str, service: str, method: str) -> _Guard:
        start = functools.partial(self._metrics.start, kind, service, method)
        return _Guard(start, self._on_fault, method, self._reader_timeout_s, self._bounds)


def _writes_itself(handler: grpc.RpcMethodHandler[Any, Any]) -> bool:
    # health.Watch is a coroutine that writes to its context; there is nothing to iterate over.
    inner = handler.unary_stream or handler.stream_stream
    return inner is not None and not inspect.isasyncgenfunction(inner)


def _kind(handler: grpc.RpcMethodHandler[Any, Any]) -> str:
    return _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]


class _Guard:
    def __init__(
        self,
        start: Callable[[], Callable[[grpc.StatusCode], None]],
        on_fault: Callable[[], None],
        method: str,
        reader_timeout_s: float,
        bounds: DeadlineMonitor,
    ) -> None:
        self._bounds = bounds
        self._start = start
        self._on_fault = on_fault
        self._method = method
        self._reader_timeout_s = reader_timeout_s

    def bounded(self, context: Any) -> contextlib.AbstractContextManager[None]:
        """Return a block that must end by the caller's deadline, if it has one."""
        left = context.time_remaining()
        if left is None:
            return contextlib.nullcontext()
        return self._bounds.within(f"a call of {self._method}", left)

    async def unary(self, inner: Callable[..., Awaitable[Any]], request: Any, context: Any) -> Any:
        end = self._start()
        try:
            result = await inner(request, context)
        except BaseException as error:
            await self._fail(error, context, end)
            raise
        else:
            end(grpc.StatusCode.OK)
            return result

    async def stream(
        self, inner: Callable[..., AsyncGenerator[Any]], request: Any, context: Any
    ) -> None:
        end = self._start()
        try:
            # Closed before a refusal is sent, which may wait for the reader: a slot is not held.
            async with contextlib.aclosing(inner(request, context)) as messages:
                async for message in messages:
                    await self._write(context, message)
        except BaseException as error:
            await self._fail(error, context, end)
            raise
        else:
            end(grpc.StatusCode.OK)

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
                f"{self._method} again and read faster, or raise reader_timeout_s",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    async def _fail(
        self, error: BaseException, context: Any, end: Callable[[grpc.StatusCode], None]
    ) -> None:
        """Abort the call, or return where the error must be passed on as it is."""
        if isinstance(error, asyncio.CancelledError):
            end(grpc.StatusCode.CANCELLED)
            return
        if isinstance(error, grpc.aio.UsageError) and context.cancelled():
            # The caller left between two messages.
            end(grpc.StatusCode.CANCELLED)
            raise asyncio.CancelledError
        if isinstance(error, grpc.aio.AbortError):
            end(context.code() or grpc.StatusCode.UNKNOWN)
            return
        if not isinstance(error, WeightSyncError):
            logger.error("%s failed", self._method, exc_info=error)
            if system_fault(error, self._method) is None:
                self._on_fault()
            error = to_refusal(error, self._method)
        end(error.code)
        status = to_status(error)
        # It goes no further: a task or a push that keeps it need not keep every frame of its way.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        await context.abort_with_status(status)


def _wrap(
    handler: grpc.RpcMethodHandler[Any, Any], guard: _Guard
) -> grpc.RpcMethodHandler[Any, Any]:
    inner = behavior_of(handler)

    async def unary(request: Any, context: Any) -> Any:
        with guard.bounded(context):
            return await guard.unary(inner, request, context)

    async def stream(request: Any, context: Any) -> None:
        with guard.bounded(context):
            await guard.stream(inner, request, context)

    return with_behavior(handler, stream if handler.response_streaming else unary)
