"""What goes on past its own bound is seen, and what has ended or may go on is not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from tests.support.clocks import Clocks
from tests.unit.server.engine.plant import Plant, plant, until
from tests.unit.server.world import begin, simple, world
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.tasks import DeadlineMonitor
from weightsync_server.push.lifecycle import PushLifecycle
from weightsync_server.rpc.status_interceptor import GuardInterceptor
from weightsync_server.usecases.guard import CallGuard, RpcMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


def test_only_what_has_not_ended_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks.over(monkeypatch)
    bounds = DeadlineMonitor()
    with bounds.within("a", 10), bounds.within("a", 20):
        clocks.let_pass(10)
        assert list(bounds.overdue()) == []
        clocks.let_pass(5)
        (first,) = bounds.overdue()
        assert first.startswith("a (no. 1) ")
        clocks.let_pass(10)
        assert next(iter(bounds.overdue())) == first, "the same sentence at each look"
        assert len(list(bounds.overdue())) == 2
    assert list(bounds.overdue()) == []


async def _unary(held: asyncio.Event, request: bytes, context: Any) -> bytes:
    # It does not care that its caller has gone.
    while not held.is_set():
        try:
            await held.wait()
        except asyncio.CancelledError:
            continue
    return request


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_call_that_outlives_its_deadline(kind: str) -> None:
    bounds, held = DeadlineMonitor(), asyncio.Event()
    guard = CallGuard(RpcMetrics(CollectorRegistry()), lambda: None, bounds=bounds)
    server = grpc.aio.server(interceptors=[GuardInterceptor(guard)])

    async def unary(request: bytes, context: Any) -> bytes:
        return await _unary(held, request, context)

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await _unary(held, request, context)

    handler: Any = (
        grpc.unary_unary_rpc_method_handler(unary)
        if kind == "unary_unary"
        else grpc.unary_stream_rpc_method_handler(stream)
    )
    handlers = {"Slow": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = getattr(channel, kind)("/t.T/Slow")
        answer = call(b"a", timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (answer if kind == "unary_unary" else answer.read())
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(list(bounds.overdue())) == 1)
        assert "a call of Slow" in next(iter(bounds.overdue()))
        held.set()
        await until(lambda: not list(bounds.overdue()))
    await server.stop(None)


async def test_an_idle_push_that_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PushLifecycle, "_too_idle", lambda _: None)
    async with world(tmp_path, limits={"resume_timeout_s": 0.2}) as here:
        push = await here.pushes.begin(begin(version=2, shard_count=1), 1)
        shard = simple(2)[0]
        await here.join(push.push_id, [*shard.layout(), *shard.chunks(100)[:1]])
        assert list(here.pushes.overdue()) == []
        await until(lambda: bool(list(here.pushes.overdue())))
        (text,) = here.pushes.overdue()
        assert "version 2" in text


async def test_a_push_that_waits_for_its_slot_is_not_idle(tmp_path: Path) -> None:
    async with world(tmp_path, slots=1, limits={"resume_timeout_s": 5}) as here:
        first = await here.pushes.begin(begin(version=2, shard_count=1), 1)
        waiting = asyncio.create_task(here.pushes.begin(begin(version=3, shard_count=1), 20))
        await until(lambda: len(here.pushes.status()) == 2)
        await asyncio.sleep(0.05)
        assert list(here.pushes.overdue()) == []
        await here.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
        assert (await waiting).version == 3


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Plant]:
    async with plant(tmp_path) as made:
        await made.ready()
        yield made


async def test_a_pause_that_does_not_end(it: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks.over(monkeypatch)
    await it.push(2)
    held = asyncio.Event()

    # The bound of the commit itself does not hold.
    session = it.keeper._session
    assert session is not None
    commit = session.ranks.commit

    async def late(apply_id: str, version: int, timeout_s: float) -> Any:
        await held.wait()
        return await commit(apply_id, version, timeout_s)

    monkeypatch.setattr(session.ranks, "commit", late)
    applying = asyncio.create_task(it.apply(2))
    await until(lambda: it.engine.events[-1] == "pause")
    clocks.let_pass(60)
    assert list(it.metrics.bounds.overdue()) == []
    clocks.let_pass(600)
    (text,) = it.metrics.bounds.overdue()
    assert "the pause of apply" in text
    held.set()
    # Meanwhile the lease has run out, so that its resume is refused.
    with pytest.raises(WeightSyncError, match="is not the current lease"):
        await applying
    assert list(it.metrics.bounds.overdue()) == []
