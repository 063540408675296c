from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from tests.unit.server.engine.plant import until
from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import from_call
from weightsync_server.rpc.status_interceptor import GuardedCall, GuardInterceptor
from weightsync_server.usecases.guard import CallGuard, Method, RpcMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

KINDS = {"Unary": "unary", "Sent": "client_stream", "Got": "server_stream", "Both": "bidi_stream"}


@dataclass
class Service:
    """One method of each kind; all do what `act` says."""

    error: BaseException | None = None
    gate: asyncio.Event | None = None
    ended: list[str] = field(default_factory=list)

    async def _act(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def unary(self, request: bytes, context: Any) -> bytes:
        await self._act()
        return request

    async def sent(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        got = [request async for request in requests]
        await self._act()
        return b"".join(got)

    async def got(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield request
            await self._act()
            yield request
        finally:
            self.ended.append("got")

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
        await self._act()


@dataclass
class Served:
    service: Service
    registry: CollectorRegistry
    channel: grpc.aio.Channel
    health: health.aio.HealthServicer
    faults: list[None]

    async def call(self, method: str) -> list[bytes]:
        name = f"/t.T/{method}"
        if method == "Unary":
            return [await self._raw("unary_unary", name)(b"a", timeout=10)]
        if method == "Sent":
            return [await self._raw("stream_unary", name)(iter([b"a", b"b"]), timeout=10)]
        if method == "Got":
            return [m async for m in self._raw("unary_stream", name)(b"a", timeout=10)]
        calls = self._raw("stream_stream", name)(iter([b"a", b"b"]), timeout=10)
        return [message async for message in calls]

    def _raw(self, kind: str, name: str) -> Any:
        return getattr(self.channel, kind)(name)

    async def refused(self, method: str) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(method)
        return caught.value

    def count(self, name: str, method: str, **labels: str) -> float:
        facts = {"grpc_type": KINDS[method], "grpc_service": "t.T", "grpc_method": method}
        return self.registry.get_sample_value(name, facts | labels) or 0

    async def handled(self, method: str, code: str) -> None:
        await until(
            lambda: self.count("grpc_server_handled_total", method, grpc_code=code) == 1, 10
        )
        assert self.count("grpc_server_started_total", method) == 1
        assert self.count("grpc_server_handling_seconds_count", method) == 1
        codes = {
            sample.labels["grpc_code"]
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "grpc_server_handled_total"
        }
        assert codes == {code}, "one end, one status"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    service, registry = Service(), CollectorRegistry()
    faults: list[None] = []
    guard = CallGuard(RpcMetrics(registry), lambda: faults.append(None))
    server = grpc.aio.server(interceptors=[GuardInterceptor(guard)])
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(service.unary),
        "Sent": grpc.stream_unary_rpc_method_handler(service.sent),
        "Got": grpc.unary_stream_rpc_method_handler(service.got),
        "Both": grpc.stream_stream_rpc_method_handler(service.both),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(service, registry, channel, checks, faults)
    await server.stop(None)


@pytest.mark.parametrize("method", KINDS)
async def test_what_works_goes_through_and_is_counted(served: Served, method: str) -> None:
    assert b"".join(await served.call(method)) in (b"a", b"aa", b"ab")
    await served.handled(method, "OK")
    assert not served.faults


@pytest.mark.parametrize("method", KINDS)
async def test_our_error_becomes_a_rich_status(served: Served, method: str) -> None:
    served.service.error = WeightSyncError(
        Reason.NO_SLOT, "no slot", metadata={"slots": "2"}, retry_after_s=2.0
    )
    told = await served.refused(method)
    assert (told.code(), told.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
    error = from_call(told)
    assert error is not None
    assert (error.reason, error.metadata) == (Reason.NO_SLOT, {"slots": "2"})
    assert error.retry_after_s == 2.0
    await served.handled(method, "ResourceExhausted")
    assert not served.faults


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize(
    "error", [RuntimeError("secret token"), KeyError("secret"), TimeoutError("secret")]
)
async def test_a_fault_tells_nothing_and_is_counted(
    served: Served, method: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    served.service.error = error
    told = await served.refused(method)
    assert told.code() is grpc.StatusCode.UNAVAILABLE
    assert "secret" not in f"{told.details()} {told.debug_error_string()}"
    assert "secret" not in str(list(told.trailing_metadata()))
    back = from_call(told)
    assert back is not None
    assert back.reason is Reason.FAULT
    assert method in back.message
    await served.handled(method, "Unavailable")
    assert len(served.faults) == 1
    assert "secret" in caplog.text, "the log tells why"


@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (OSError(errno.EIO, "secret"), Reason.FAULT, "Input/output error"),
        (OSError(errno.ENOSPC, "secret"), Reason.DISK_EXHAUSTED, "No space left"),
        (PermissionError(errno.EACCES, "secret", "/a/secret"), Reason.FAULT, "Permission denied"),
        (MemoryError("secret"), Reason.MEMORY_EXHAUSTED, "no memory is left"),
    ],
    ids=["EIO", "ENOSPC", "EACCES", "memory"],
)
async def test_what_the_system_refuses_is_told_and_no_violation(
    served: Served,
    method: str,
    error: Exception,
    reason: Reason,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served.service.error = error
    back = from_call(await served.refused(method))
    assert back is not None
    assert back.reason is reason
    assert words in back.message
    assert "secret" not in f"{back.message} {back.metadata}"
    assert not served.faults
    assert "secret" in caplog.text, "the log tells why"


@pytest.mark.parametrize("method", KINDS)
async def test_a_caller_that_goes_away_is_a_cancellation(served: Served, method: str) -> None:
    served.service.gate = asyncio.Event()
    task = asyncio.ensure_future(served.call(method))
    await until(lambda: served.count("grpc_server_started_total", method) == 1)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await served.handled(method, "Cancelled")
    assert not served.faults


async def test_a_stream_that_is_left_early_is_closed(served: Served) -> None:
    served.service.gate = asyncio.Event()
    call = served._raw("unary_stream", "/t.T/Got")(b"a")
    assert await call.read() == b"a"
    call.cancel()
    await served.handled("Got", "Cancelled")
    await until(lambda: served.service.ended == ["got"])


class LeftCall:
    """A call whose caller has died, which gRPC says at the next message and not before."""

    async def write(self, message: bytes) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    def cancelled(self) -> bool:
        return False

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "unix:"

    def code(self) -> None:
        return None


class Ends(RpcMetrics):
    """Keeps how calls ended."""

    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []

    def start(self, kind: str, service: str, method: str) -> Callable[[grpc.StatusCode], None]:
        return self.codes.append


async def test_a_message_that_nobody_is_there_to_take_is_no_fault() -> None:
    ends = Ends()
    faults: list[None] = []
    service = Service()
    guard = CallGuard(ends, lambda: faults.append(None))
    call = GuardedCall(guard, Method("t.T", "Got", sends_stream=False, gets_stream=True), 10)
    with pytest.raises(asyncio.CancelledError):
        await call.stream(service.got, b"a", LeftCall())
    assert (ends.codes, faults) == ([grpc.StatusCode.CANCELLED], [])
    assert service.ended == ["got"]


async def test_an_unknown_method_is_not_counted(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served._raw("unary_unary", "/t.T/None")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert not next(iter(served.registry.collect())).samples


async def test_health_watch_works(served: Served) -> None:
    status = health_pb2.HealthCheckResponse
    await served.health.set("serving", status.NOT_SERVING)
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    request = health_pb2.HealthCheckRequest(service="serving")
    assert (await stub.Check(request, timeout=10)).status == status.NOT_SERVING
    watch = stub.Watch(request, timeout=10)
    assert (await watch.read()).status == status.NOT_SERVING
    await served.health.set("serving", status.SERVING)
    assert (await watch.read()).status == status.SERVING
    watch.cancel()
    assert not served.faults
