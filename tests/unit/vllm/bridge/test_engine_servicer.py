"""The bridge's contract over a real socket: who drives, how errors travel, what is waited for.

The stand-in for vLLM's AsyncLLM is that of test_adapter.py; the server's client is the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _until
from weightsync import failpoints
from weightsync.engine import (
    BETWEEN_STEPS,
    FENCES_ON_EXPIRY,
    PROTOCOL_VERSION,
    EngineState,
    OnExpiry,
    OpenApply,
    PauseSpec,
    SwitchOrder,
    WaitingUpdate,
)
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge import engine_servicer
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync.vllm.bridge.engine_servicer import EngineServicer
from weightsync.vllm.extensions import update_makers
from weightsync.wire.rpc_status import from_call
from weightsync_server.engine.drivers import bridge
from weightsync_server.engine.drivers.bridge import BridgeEngine
from weightsync_server.engine.refusals import duration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


@asynccontextmanager
async def _bridge(llm: Llm, folder: str) -> AsyncIterator[VllmEngine]:
    """Serve a bridge at `folder`/s; each one is another start of an engine."""
    engine = VllmEngine(llm, "0.32.0", "bridge", update_makers())
    await engine.start()
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(EngineServicer(engine, ""), server)
    server.add_insecure_port(f"unix:{folder}/s")
    await server.start()
    try:
        yield engine
    finally:
        await server.stop(None)
        await engine.close()


@pytest.fixture
async def folder() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="wb") as folder:
        yield folder


@pytest.fixture
async def first(folder: str) -> AsyncIterator[BridgeEngine]:
    made = BridgeEngine(f"unix:{folder}/s")
    yield made
    await made.close()


@pytest.fixture
async def second(folder: str) -> AsyncIterator[BridgeEngine]:
    made = BridgeEngine(f"unix:{folder}/s")
    yield made
    await made.close()


async def _refused(call: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await call
    return caught.value


async def _answered(call: Callable[[], Awaitable[object]]) -> WeightSyncError:
    """Return the refusal once the channel has left the connection to the engine that ended."""
    async with asyncio.timeout(10):
        error = await _refused(call())
        while "does not answer" in error.message:
            error = await _refused(call())
    return error


def _of_an_older_release(*servers: BridgeEngine) -> None:
    """Have servers say hello as those do that know no owners."""

    async def nothing(seconds: float) -> None:
        """Own nothing."""

    for server in servers:
        server._ownership.take = nothing  # type: ignore[method-assign] # an older release


async def test_of_older_servers_the_one_that_said_hello_last_drives(
    folder: str, first: BridgeEngine, second: BridgeEngine
) -> None:
    llm = Llm()
    _of_an_older_release(first, second)
    async with _bridge(llm, folder) as engine:
        await first.hello()
        await first.resume("", 7, DIGEST)
        lease = await first.pause(PauseSpec(), 30)
        await second.hello()
        llm.log.clear()
        for call in (
            first.pause(PauseSpec(), 30),
            first.renew(lease.lease_id, 30),
            first.resume(lease.lease_id, 7, DIGEST),
            first.switch(SwitchOrder("new", "old", 8, DIGEST, DIGEST, 1.0)),
            first.fence("of the first"),
            first.call_workers("weightsync_commit", {}),
            first.offer_checkpoint("", "offer"),
            first.updates.offer("update", "", "offer"),
            first.updates.end("update", 7, ""),
            anext(first.updates.watch()),
            first.health(),
        ):
            error = await _refused(call)
            assert error.reason is Reason.ENGINE_REFUSED
            assert "another weightsync-server" in error.message
        assert llm.log == []
        assert engine.condition()[0] is EngineState.PAUSED
        await second.fence("of the second")
        await second.resume("", 7, DIGEST)
        assert (await second.health()).state is EngineState.SERVING


async def test_an_owner_that_lives_keeps_its_engine(
    folder: str, first: BridgeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_servicer, "_LEAVES_S", 0.01)
    second = BridgeEngine(f"unix:{folder}/s", Path("/run/of/the/second"))
    older = BridgeEngine(f"unix:{folder}/s")
    _of_an_older_release(older)
    llm = Llm()
    async with _bridge(llm, folder) as engine:
        await first.hello()
        await first.resume("", 7, DIGEST)
        llm.log.clear()
        for call in (second.hello, second.health, lambda: second.fence("no")):
            error = await _refused(call())
            assert error.reason is Reason.ENGINE_OWNED
            assert f"pid {os.getpid()}, run_dir unknown" in error.message
        # An older server is told so, too, by a reason that it knows.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await older._stub.Hello(pb.HelloRequest(protocol=PROTOCOL_VERSION, server_id="older"))
        told = from_call(caught.value)
        assert told is not None
        assert told.reason is Reason.ENGINE_REFUSED
        assert llm.log == []
        assert (await first.health()).state is engine.condition()[0] is EngineState.SERVING
        await first.close()
        await _answered_at_last(second.hello)
        await second.fence("of the second")
        await second.close()
        await older.close()


async def test_why_an_engine_does_not_serve_names_whose_it_is() -> None:
    engine = VllmEngine(Llm(), "0.32.0", "bridge")
    await engine.start()
    servicer = EngineServicer(engine, "")
    unproved = servicer.condition()
    assert unproved == engine.condition()
    owner = pb.Owner(server_id="a", pid=7, run_dir="/run/a")
    owning: Any = servicer.Own(pb.OwnRequest(owner=owner), None)
    await anext(owning)
    named = "; the engine is that of weightsync-server (pid 7, run_dir /run/a)"
    assert servicer.condition() == (EngineState.UNRECONCILED, unproved[1] + named)
    await engine.fence("because of that")
    assert servicer.condition() == (EngineState.FENCED, "because of that" + named)
    assert (await engine.health()).reason == "because of that"
    await engine.resume("", 7, DIGEST)
    assert servicer.condition() == (EngineState.SERVING, "")
    await owning.aclose()
    await engine.fence("because of that")
    assert servicer.condition() == (EngineState.FENCED, "because of that")
    await engine.close()


async def test_an_owner_whose_connection_broke_takes_the_engine_back_when_the_other_is_gone(
    folder: str, first: BridgeEngine, second: BridgeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_servicer, "_LEAVES_S", 0.01)
    async with _bridge(Llm(), folder) as engine:
        await first.hello()
        await first.resume("", 7, DIGEST)
        # As where the connection breaks, and the process lives.
        first._ownership.close()
        await _answered_at_last(second.hello)
        error = await _refused(first.health())
        assert error.reason is Reason.ENGINE_OWNED
        assert (await _refused(first.fence("no"))).reason is Reason.ENGINE_OWNED
        await second.fence("of the second")
        await second.close()
        async with asyncio.timeout(5):
            while (error := await _refused(first.health())).reason is Reason.ENGINE_OWNED:  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.01)
        assert error.reason is Reason.ENGINE_AWAY
        assert "takes it back" in error.message
        # Now it is asked how it is, and then hello is said.
        assert (await first.health()).state is EngineState.FENCED
        await first.hello()
        await first.resume("", 7, DIGEST)
        assert engine.condition()[0] is EngineState.SERVING


async def test_a_bridge_of_an_older_release_obeys_who_said_hello_last(
    folder: str, first: BridgeEngine, second: BridgeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineServicer, "Own", engine_pb2_grpc.EngineServiceServicer.Own)
    async with _bridge(Llm(), folder):
        await first.hello()
        await second.hello()
        error = await _refused(first.health())
        assert error.reason is Reason.ENGINE_REFUSED
        assert "stop one of the two" in error.message
        await second.resume("", 7, DIGEST)


@pytest.mark.parametrize(
    "owner",
    [pb.Owner(), pb.Owner(server_id="a" * 65), pb.Owner(server_id="a", run_dir="b" * 5000)],
)
async def test_what_names_no_owner_is_refused(
    folder: str, first: BridgeEngine, owner: pb.Owner
) -> None:
    async with _bridge(Llm(), folder):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first._stub.Own(pb.OwnRequest(owner=owner)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await first.hello()


async def _answered_at_last(call: Callable[[], Awaitable[object]]) -> None:
    """Return when a call is answered that is refused as long as another owner is there."""
    async with asyncio.timeout(5):
        while True:
            with contextlib.suppress(WeightSyncError):
                await call()
                return
            await asyncio.sleep(0.01)


async def test_a_server_that_connects_learns_which_apply_is_open(
    folder: str, first: BridgeEngine, second: BridgeEngine
) -> None:
    async with _bridge(Llm(), folder) as engine:
        info = await first.hello()
        assert info.served_model_name == "policy"
        assert FENCES_ON_EXPIRY in info.capabilities
        assert info.open_apply is None
        await first.resume("", 7, DIGEST)
        apply = OpenApply("a1", 7, 8)
        await first.pause(PauseSpec(on_expiry=OnExpiry.FENCE, apply=apply), 0.05)
        await _until(lambda: engine.condition()[0] is EngineState.FENCED)
        await first.close()
        info, health = await second.hello(), await second.health()
        assert info.state is health.state is EngineState.FENCED
        assert info.open_apply == health.open_apply == apply
        assert "before it was decided" in info.reason
        await second.resume("", 7, DIGEST)
        assert (await second.health()).open_apply is None
        # A pause that says nothing resumes by itself, as that of an older server.
        await second.pause(PauseSpec(), 0.05)
        await _until(lambda: engine.condition()[0] is EngineState.SERVING)


async def test_an_end_of_a_pause_that_is_not_known_is_refused(
    folder: str, first: BridgeEngine
) -> None:
    async with _bridge(Llm(), folder) as engine:
        await first.hello()
        await first.resume("", 7, DIGEST)
        request = pb.PauseRequest(lease=duration(5), on_expiry=9, server_id=first._id)  # type: ignore[arg-type] # of a later release
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first._stub.Pause(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "on_expiry 9 is not known" in (caught.value.details() or "")
        assert engine.condition()[0] is EngineState.SERVING


async def test_a_new_start_of_an_engine_wants_a_hello_first(
    folder: str, first: BridgeEngine
) -> None:
    async with _bridge(Llm(), folder):
        before = await first.hello()
    async with _bridge(Llm(), folder) as engine:
        error = await _answered(lambda: first.call_workers("weightsync_state", {}))
        assert error.reason is Reason.ENGINE_AWAY
        assert "call Hello" in error.message
        assert (await first.health()).engine_id != before.engine_id
        assert (await first.hello()).engine_id != before.engine_id
        await first.resume("", 7, DIGEST)
        assert engine.condition()[0] is EngineState.SERVING


async def test_a_fault_of_the_bridge_is_told_without_its_text(
    folder: str, first: BridgeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan("bridge.call=error(ENOSPC)"))
    async with _bridge(Llm(), folder):
        await first.hello()
        error = await _refused(first.call_workers("weightsync_state", {}))
        assert error.reason is Reason.FAULT
        assert "No space" not in error.message


async def test_a_pause_or_resume_that_gets_no_answer_is_given_up(
    folder: str, first: BridgeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "_GRACE_S", 0.3)
    first._resume_s = 0.5
    plan = "bridge.paused=1*sleep(5);bridge.resumed=1*sleep(5)"
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan(plan))
    async with _bridge(Llm(), folder):
        await first.hello()
        error = await _refused(first.resume("", 7, DIGEST))
        assert error.reason is Reason.ENGINE_AWAY
        # It was done all the same, and that is what is told.
        assert (await first.health()).state is EngineState.SERVING
        error = await _refused(first.pause(PauseSpec(), 0.2))
        assert error.reason is Reason.ENGINE_AWAY
        async with asyncio.timeout(5):
            while (await first.health()).state is not EngineState.SERVING:  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.02)


def test_a_socket_that_nobody_serves_is_told(tmp_path: Path) -> None:
    async def ask() -> WeightSyncError:
        engine = BridgeEngine(f"unix:{tmp_path}/none")
        try:
            return await _refused(engine.health())
        finally:
            await engine.close()

    error = asyncio.run(ask())
    assert error.reason is Reason.ENGINE_AWAY
    assert "VLLM_PLUGINS=weightsync" in error.message


async def test_a_switch_goes_over_the_bridge_and_back(folder: str, first: BridgeEngine) -> None:
    llm = Llm()
    async with _bridge(llm, folder) as engine:
        assert BETWEEN_STEPS in (await first.hello()).capabilities
        await first.resume("", 7, DIGEST)
        llm.log.clear()
        llm.digests = ["cd" * 16] * 2
        order = SwitchOrder("new", "old", 8, "cd" * 16, DIGEST, 1.5)
        outcome = await first.switch(order)
        assert (outcome.serves, outcome.label_set) == ("cd" * 16, True)
        assert [reply["rank"] for reply in outcome.replies] == ["0/0/0", "0/0/1"]
        assert llm.log == ["weightsync_switch", "label 8"]
        assert engine.condition()[0] is EngineState.SERVING


async def test_updates_are_watched_over_the_socket_until_the_watcher_leaves(
    folder: str, first: BridgeEngine, second: BridgeEngine
) -> None:
    async with _bridge(Llm(), folder) as engine:
        received = _received(engine)
        await first.hello()
        async with contextlib.aclosing(first.updates.watch()) as updates:
            waiting = asyncio.ensure_future(anext(updates))
            async with asyncio.timeout(10):
                await received._watched.wait()
            assert received._watcher is not None
            received._watcher.put_nowait(WaitingUpdate("u", "weightsync_ipc", "step 3"))
            assert await waiting == WaitingUpdate("u", "weightsync_ipc", "step 3")
            # A server that takes over takes the watch, too.
            waiting = asyncio.ensure_future(anext(updates))
            first._ownership.close()
            await second.hello()
            async with contextlib.aclosing(second.updates.watch()) as others:
                other = asyncio.ensure_future(anext(others))
                with pytest.raises(StopAsyncIteration):
                    await waiting
                other.cancel()
                await asyncio.wait([other])
        await _until_nobody_watches(engine)
        assert (await _refused(second.updates.offer("u", "", "o"))).message.startswith("update 'u'")
        await second.updates.end("u", 7, "")


def _received(engine: VllmEngine) -> Any:
    """Return what the engine receives; a tree without that extension skips the test."""
    extension = pytest.importorskip("weightsync.vllm.extensions.received.received_updates")
    assert isinstance(engine.updates, extension.ReceivedUpdates)
    return engine.updates


async def _until_nobody_watches(engine: VllmEngine) -> None:
    for _ in range(1000):
        if _received(engine)._watcher is None:
            return
        await asyncio.sleep(0.01)
    pytest.fail("a watcher that left still counts")


def _speaking(monkeypatch: pytest.MonkeyPatch, side: Any, oldest: int, newest: int) -> None:
    monkeypatch.setattr(side, "OLDEST_PROTOCOL", oldest)
    monkeypatch.setattr(side, "PROTOCOL_VERSION", newest)


@pytest.mark.parametrize(
    ("server", "bridge_side", "agreed"),
    [
        ((2, 3), (2, 2), 2),
        ((2, 2), (2, 3), 2),
        ((2, 3), (2, 3), 3),
        ((3, 4), (2, 3), 3),
        ((3, 4), (2, 2), 0),
        ((2, 2), (3, 4), 0),
    ],
)
async def test_server_and_bridge_of_two_releases_speak_what_both_know(
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    first: BridgeEngine,
    server: tuple[int, int],
    bridge_side: tuple[int, int],
    agreed: int,
) -> None:
    _speaking(monkeypatch, bridge, *server)
    _speaking(monkeypatch, engine_servicer, *bridge_side)
    async with _bridge(Llm(), folder):
        if agreed:
            assert (await first._agree(server[1])).protocol == agreed
            assert (await first.hello()).kind == "bridge"
        else:
            error = await _refused(first.hello())
            assert error.reason is Reason.ENGINE_UNSUPPORTED
            assert "same weightsync release on both sides" in error.message


async def test_a_server_that_cannot_drive_an_engine_leaves_it_to_one_that_can(
    monkeypatch: pytest.MonkeyPatch, folder: str, first: BridgeEngine, second: BridgeEngine
) -> None:
    monkeypatch.setattr(engine_servicer, "_LEAVES_S", 0.01)
    async with _bridge(Llm(), folder):
        with monkeypatch.context() as older:
            _speaking(older, bridge, 99, 99)
            assert (await _refused(first.hello())).reason is Reason.ENGINE_UNSUPPORTED
        await _answered_at_last(second.hello)
        await second.fence("of the second")


def _newest(engine: VllmEngine) -> int | None:
    return engine.live.newest


async def test_only_who_drives_an_engine_tells_which_version_is_the_newest(
    folder: str, first: BridgeEngine, second: BridgeEngine
) -> None:
    async with _bridge(Llm(), folder) as engine:
        await first._stub.Health(pb.HealthRequest(newest_version=9))
        assert _newest(engine) is None
        await first.hello()
        await first.health()
        assert _newest(engine) is None
        await first.health(0)
        assert _newest(engine) == 0
        await first.health(47)
        with pytest.raises(WeightSyncError):
            await second.health(3)
        await first.health()
        await first._stub.Health(pb.HealthRequest(reported_by=first._id))
        assert _newest(engine) == 47
        # What it says of the limit is another matter.
        await first.serve_for(60)
        limited = engine._limit._until
        await first.health(48)
        assert (_newest(engine), engine._limit._until) == (48, limited)
