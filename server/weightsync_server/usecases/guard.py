"""The one place where calls are counted and bounded, and what fails in them becomes a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf import descriptor_pool
from prometheus_client import CollectorRegistry, Counter, Histogram

from weightsync.errors import WeightSyncError
from weightsync.wire.rpc_status import as_sent
from weightsync_server.auth.roles import RULES
from weightsync_server.ops import traces
from weightsync_server.ops.os_errors import system_fault, to_refusal
from weightsync_server.ops.tasks import DeadlineMonitor

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

    from weightsync_server.auth.caller import Caller, UseCase
    from weightsync_server.usecases.rate_limits import RateLimits


logger = logging.getLogger(__name__)

#: The ecosystem's names of calls, by whether requests and responses are streams.
_KINDS: Mapping[tuple[bool, bool], str] = {
    (False, False): "unary",
    (True, False): "client_stream",
    (False, True): "server_stream",
    (True, True): "bidi_stream",
}


class Method(NamedTuple):
    """A method as it is counted, and whether its requests and responses are streams."""

    service: str
    name: str
    sends_stream: bool
    gets_stream: bool

    @classmethod
    def of(cls, path: str) -> Method:
        _, service, name = path.split("/")
        found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
        return cls(service, name, found.client_streaming, found.server_streaming)

    @property
    def grpc_type(self) -> str:
        return _KINDS[self.sends_stream, self.gets_stream]

    @property
    def changes(self) -> bool:
        """Whether such calls may change state."""
        rule = RULES.get(f"/{self.service}/{self.name}")
        return rule is not None and rule.changes

    @property
    def limit(self) -> str:
        if self.sends_stream or self.gets_stream:
            return {"PushWeights": "streams", "PullWeights": "pulls"}.get(self.name, "watches")
        return "calls"


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
        for found in service.methods:
            method = Method.of(f"/{service.full_name}/{found.name}")
            labels = (method.grpc_type, method.service, method.name)
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


class CallGuard:
    """Counts, limits and bounds calls, by whichever door they come.

    What the operating system refused is told as such, and is no fault of the server; `on_fault` is
    called for each fault. `bounds` gets every call that has a deadline. `spans` makes a span of
    each call that may change state; None: they are not traced.
    """

    def __init__(
        self,
        metrics: RpcMetrics,
        on_fault: Callable[[], None],
        limits: RateLimits | None = None,
        bounds: DeadlineMonitor | None = None,
        spans: traces.SpanMaker | None = None,
    ) -> None:
        self._metrics = metrics
        self._on_fault = on_fault
        self._limits = limits
        self._bounds = bounds or DeadlineMonitor()
        self._spans = spans

    def bounded(
        self, method: Method, left_s: float | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block that must end by the caller's deadline, if it has one."""
        if left_s is None:
            return contextlib.nullcontext()
        return self._bounds.within(f"a call of {method.name}", left_s)

    def limited(self, method: Method, who: str) -> contextlib.AbstractContextManager[None]:
        """Return a block that is refused where caller `who` goes beyond the limits."""
        if self._limits is None:
            return contextlib.nullcontext()
        return self._limits.admitted(method.limit, method.service, who)

    @contextlib.contextmanager
    def counted(
        self, method: Method, who: str, aborted: Callable[[], grpc.StatusCode | None] = lambda: None
    ) -> Iterator[None]:
        """Count a call of `who`; what fails in the block is raised as the refusal that it means.

        That is what the system refused, or FAULT, textless and logged. `aborted` tells with which
        status gRPC's own context was.
        """
        end = self._metrics.start(method.grpc_type, method.service, method.name)
        if self._spans is not None and method.changes:
            end = traces.timed_call(self._spans, method.service, method.name, end)
        try:
            with self.limited(method, who):
                yield
        except (asyncio.CancelledError, GeneratorExit):
            end(grpc.StatusCode.CANCELLED)
            raise
        except grpc.aio.AbortError:
            end(aborted() or grpc.StatusCode.UNKNOWN)
            raise
        except WeightSyncError as error:
            end(error.code)
            raise
        except BaseException as error:
            logger.exception("%s failed", method.name)
            if system_fault(error, method.name) is None:
                self._on_fault()
            refusal = to_refusal(error, method.name)
            end(refusal.code)
            raise refusal from None
        else:
            end(grpc.StatusCode.OK)

    def guarded(self, path: str, call: UseCase) -> UseCase:
        """Return what serves a method for another door, with refusals as gRPC would send them."""
        method = Method.of(path)

        async def answer(caller: Caller, request: Any) -> Any:
            with self._whole(method, caller):
                return await call(caller, request)

        async def stream(caller: Caller, request: Any) -> AsyncGenerator[Any]:
            with self._whole(method, caller):
                async with contextlib.aclosing(call(caller, request)) as responses:
                    async for response in responses:
                        yield response

        return stream if inspect.isasyncgenfunction(call) else answer

    @contextlib.contextmanager
    def _whole(self, method: Method, caller: Caller) -> Iterator[None]:
        try:
            with self.bounded(method, caller.left_s()), self.counted(method, caller.name):
                yield
        except WeightSyncError as error:
            sent = as_sent(error)
            let_go(error)
            try:
                raise sent from None
            finally:
                # It has this frame, which would have it: such a pair keeps the whole request.
                del sent


def let_go(error: BaseException) -> None:
    """Let an error that goes no further keep nothing alive.

    A task or a push that keeps it need not keep every frame of its way.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
