"""What callers may ask at once and per second; the rest is refused before it costs anything."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import to_status
from weightsync_server.auth.callers import caller, host_of
from weightsync_server.ops.method_handlers import behavior_of, with_behavior

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

__all__ = ["Admission", "CallLimits", "Rates"]

#: Seconds worth of calls that may come at once.
_BURST_S = 2.0
#: Callers whose rates are remembered.
_CALLERS = 1024
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class CallLimits:
    """Bounds on calls, over all pushes and models.

    Attributes:
        calls_per_s: Calls per second, caller and service; twice as many may come at once.
        streams: PushWeights at once.
        pulls: PullWeights at once.
        watches: Other streams at once, such as WatchVersions and health watches.
    """

    calls_per_s: float = 500.0
    streams: int = 32
    pulls: int = 16
    watches: int = 64


class Rates:
    """Counts the calls of each caller: so many per second, and those of two seconds at once.

    Args:
        calls_per_s: Calls per second.
    """

    def __init__(self, calls_per_s: float) -> None:
        self._rate = calls_per_s
        #: When each caller's last call would have been due at the rate; the newest callers.
        self._due: OrderedDict[tuple[str, str], float] = OrderedDict()

    def take(self, who: tuple[str, str]) -> float:
        """Count a call and return 0, or return after how many seconds it may come again."""
        now = clock.monotonic()
        due = max(now - _BURST_S, self._due.pop(who, 0.0)) + 1 / self._rate
        if due > now:
            self._due[who] = due - 1 / self._rate
            return due - now
        self._due[who] = due
        if len(self._due) > _CALLERS:
            self._due.popitem(last=False)
        return 0.0


class Admission(grpc.aio.ServerInterceptor):
    """Refuses what goes beyond the limits.

    Args:
        limits: The limits.
        caller_of: Names the caller of a call by its context.
    """

    def __init__(self, limits: CallLimits, caller_of: Callable[[Any], str] = host_of) -> None:
        self._limits = limits
        self._caller_of = caller_of
        self._rates = Rates(limits.calls_per_s)
        self._open: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the handler of every method."""
        handler = await continuation(handler_call_details)
        return handler and _Door(self, handler_call_details.method, handler).handler()

    @contextlib.contextmanager
    def admitted(self, kind: str, service: str, context: Any) -> Iterator[None]:
        """Count a call from its begin to its end.

        Raises:
            WeightSyncError: LIMIT_EXCEEDED, with the time after which to come again.
        """
        name = self._caller_of(context)
        wait = self._rates.take((name, service))
        if wait:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"over {self._limits.calls_per_s:g} calls per second from {name}; call less often, "
                "or raise max_calls_per_s",
                retry_after_s=wait,
            )
        most = {
            "streams": self._limits.streams,
            "pulls": self._limits.pulls,
            "watches": self._limits.watches,
        }.get(kind)
        if most is not None and self._open[kind] >= most:
            raise WeightSyncError(
                Reason.LIMIT_EXCEEDED,
                f"{most} {kind} are open, the most there may be; end one, or raise max_{kind}",
                retry_after_s=_RETRY_AFTER_S,
            )
        caller.set(name)
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1


class _Door:
    """One method's way through the admission."""

    def __init__(
        self, admission: Admission, path: str, handler: grpc.RpcMethodHandler[Any, Any]
    ) -> None:
        self._admission = admission
        self._handler = handler
        _, self._service, method = f"/{path.lstrip('/')}".split("/", 2)
        self._kind = "calls"
        if handler.request_streaming or handler.response_streaming:
            self._kind = {"PushWeights": "streams", "PullWeights": "pulls"}.get(method, "watches")
        self._inner = behavior_of(handler)

    def handler(self) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler that goes through."""
        through: Any = self._call
        if self._handler.response_streaming:
            through = self._stream if inspect.isasyncgenfunction(self._inner) else self._writer
        return with_behavior(self._handler, through)

    async def _call(self, request: Any, context: Any) -> Any:
        with self._admission.admitted(self._kind, self._service, context):
            return await self._inner(request, context)

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        with self._admission.admitted(self._kind, self._service, context):
            async for message in self._inner(request, context):
                yield message

    async def _writer(self, request: Any, context: Any) -> None:
        # health.Watch writes to its context itself, and nothing further out tells its errors.
        try:
            with self._admission.admitted(self._kind, self._service, context):
                await self._inner(request, context)
        except WeightSyncError as error:
            await context.abort_with_status(to_status(error))
