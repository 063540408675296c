"""Rates per caller, counts of open streams, and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from tests.support.clocks import Clocks
from tests.unit.server.deltas.pushing import until
from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.rpc_status import from_call
from weightsync_server.auth.caller import host_of
from weightsync_server.push.reservation import CallerShares
from weightsync_server.rpc.status_interceptor import GuardInterceptor
from weightsync_server.usecases.guard import CallGuard, RpcMetrics
from weightsync_server.usecases.rate_limits import CallSettings, RateLimits, Rates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks.over(monkeypatch)


def test_a_caller_gets_its_rate_and_two_seconds_of_it_at_once(clocks: Clocks) -> None:
    rates = Rates(8)
    a, b = ("a", "s"), ("b", "s")
    assert [rates.take(a) for _ in range(16)] == [0] * 16
    wait = rates.take(a)
    assert wait == 0.125
    assert rates.take(a) == wait
    assert rates.take(b) == 0
    clocks.let_pass(wait)
    assert rates.take(a) == 0
    assert rates.take(a) > 0
    clocks.let_pass(3600)
    assert [rates.take(a) for _ in range(16)] == [0] * 16
    assert rates.take(a) > 0


def test_only_so_many_callers_are_remembered(clocks: Clocks) -> None:
    rates = Rates(10)
    for number in range(5000):
        assert rates.take((str(number), "s")) == 0
    assert len(rates._due) <= 1024


def refused_share(shares: CallerShares, who: str, held: int) -> bool:
    try:
        shares.check(who, held)
    except WeightSyncError as error:
        return error.reason is Reason.LIMIT_EXCEEDED
    return False


def test_a_lone_caller_may_hold_every_push_until_others_come(clocks: Clocks) -> None:
    shares = CallerShares(4)
    assert not any(refused_share(shares, "a", held) for held in range(4))
    assert not refused_share(shares, "b", 0)
    assert refused_share(shares, "a", 2)
    assert not refused_share(shares, "a", 1)
    clocks.let_pass(601)
    assert not refused_share(shares, "a", 3)
    # However many callers there are, one push is everybody's.
    assert not any(refused_share(shares, str(number), 0) for number in range(1000))
    assert len(shares._wanted) <= 4


class Served:
    """A server with one method of each kind behind the admission."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.callers: list[str] = []
        self.ended = 0

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.callers.append(host_of(context.peer()))
        return request

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield request
            while request == b"flood":
                yield bytes(1 << 20)
            await self.gate.wait()
        finally:
            self.ended += 1


@contextlib.asynccontextmanager
async def served(
    limits: CallSettings, reader_timeout_s: float = 60
) -> AsyncIterator[tuple[Served, grpc.aio.Channel]]:
    service = Served()
    guard = CallGuard(RpcMetrics(CollectorRegistry()), lambda: None, RateLimits(limits))
    server = grpc.aio.server(interceptors=[GuardInterceptor(guard, reader_timeout_s)])
    methods: Any = {
        "Call": grpc.unary_unary_rpc_method_handler(service.unary),
        "PullWeights": grpc.unary_stream_rpc_method_handler(service.stream),
        "WatchVersions": grpc.unary_stream_rpc_method_handler(service.stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield service, channel
    finally:
        service.gate.set()
        await server.stop(0)


async def refusal(call: Any) -> WeightSyncError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_call(caught.value)
    assert error is not None
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return error


async def test_calls_beyond_the_rate_are_refused_and_health_goes_on() -> None:
    async with served(CallSettings(calls_per_s=5)) as (service, channel):
        call: Any = channel.unary_unary("/t.T/Call")
        for _ in range(10):
            await call(b"")
        error = await refusal(call(b""))
        assert error.reason is Reason.LIMIT_EXCEEDED
        assert 0 < (error.retry_after_s or 0) <= 0.2
        assert service.callers == ["ipv4:127.0.0.1"] * 10
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        await asyncio.sleep(error.retry_after_s or 0)
        await call(b"")


@pytest.mark.parametrize(
    ("method", "name"), [("PullWeights", "pulls"), ("WatchVersions", "watches")]
)
async def test_open_streams_are_counted_and_given_back(method: str, name: str) -> None:
    async with served(CallSettings(pulls=1, watches=1)) as (_, channel):
        stream: Any = channel.unary_stream(f"/t.T/{method}")
        first = stream(b"")
        assert await first.read() == b""
        error = await refusal(stream(b"").read())
        assert f"max_{name}" in error.message
        first.cancel()

        async def again() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return bool(await stream(b"more").read() == b"more")
            return False

        assert await until_async(again)


async def until_async(holds: Any) -> bool:
    for _ in range(100):
        if await holds():
            return True
        await asyncio.sleep(0.02)
    return False


async def test_health_watches_are_watches() -> None:
    async with served(CallSettings(watches=1)) as (_, channel):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        first = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await first.read()).status
        error = await refusal(stub.Watch(health_pb2.HealthCheckRequest()).read())
        assert error.reason is Reason.LIMIT_EXCEEDED


async def test_a_reader_that_does_not_read_is_dropped() -> None:
    async with served(CallSettings(pulls=2), 0.5) as (service, channel):
        stalled: Any = cast("Any", channel.unary_stream("/t.T/PullWeights"))(b"flood")
        assert await anext(aiter(stalled)) == b"flood"
        # Waiting for the server is no stall: this one lasts.
        waiting: Any = cast("Any", channel.unary_stream("/t.T/WatchVersions"))(b"")
        assert await waiting.read() == b""
        await until(lambda: service.ended > 0)
        # No more of them, so long after.
        await asyncio.sleep(1)
        assert service.ended == 1
        # It is told why as soon as it reads again.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in stalled]
        error = from_call(caught.value)
        assert error is not None
        assert error.reason is Reason.DEADLINE_EXCEEDED
        assert "read faster" in error.message
        service.gate.set()
        assert await waiting.read() is grpc.aio.EOF
