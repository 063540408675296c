"""A vLLM whose server does not say any more that it may serve, over its siblings' stand-ins."""

from __future__ import annotations

import asyncio
import tempfile

import pytest

from tests.support.clocks import Clocks
from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _serving, _state, _until
from tests.unit.vllm.bridge.test_engine_servicer import _bridge
from weightsync.engine import LIMITS_SERVING, EngineState, OnExpiry, OpenApply, PauseSpec
from weightsync.engine.v1 import engine_pb2 as pb
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync_server.engine.drivers.bridge import BridgeEngine
from weightsync_server.engine.refusals import duration

_FENCING = PauseSpec(on_expiry=OnExpiry.FENCE, apply=OpenApply("a1", 7, 8))


async def _fenced(engine: VllmEngine) -> str:
    await _until(lambda: _state(engine) is EngineState.FENCED)
    return engine.condition()[1]


async def test_an_engine_that_hears_nothing_is_fenced_and_goes_on_when_it_is_let() -> None:
    llm = Llm()
    engine = await _serving(llm)
    assert LIMITS_SERVING in (await engine.hello()).capabilities
    for _ in range(5):
        await engine.serve_for(1.0)
        await asyncio.sleep(0.25)
    assert _state(engine) is EngineState.SERVING
    reason = await _fenced(engine)
    assert "weightsync-server" in reason
    assert "weightsync fleet status" in reason
    await _until(lambda: llm.log == [("keep", False)])
    # More time alone starts nothing.
    await engine.serve_for(60)
    assert _state(engine) is EngineState.FENCED
    await engine.resume("", 7, DIGEST)
    assert _state(engine) is EngineState.SERVING
    await engine.close()


async def test_no_request_passes_after_a_suspension_of_the_host_in_which_time_ran_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = Llm()
    engine = await _serving(llm)
    clocks = Clocks.over(monkeypatch)
    await engine.serve_for(60)
    assert (await engine.health()).state is EngineState.SERVING
    # The timer comes late: the event loop's clock stood still.
    clocks.suspended += 60
    state, reason = engine.condition()
    assert state is EngineState.FENCED
    assert "weightsync-server" in reason
    await _until(lambda: llm.log == [("keep", False)])
    await engine.close()


async def test_no_engine_serves_again_before_it_is_given_time() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.serve_for(0)
    await _fenced(engine)
    await _until(lambda: llm.log == [("keep", False)])
    await engine.resume("", 7, DIGEST)
    await _fenced(engine)
    await _until(lambda: llm.log[-1] == ("keep", False))
    await engine.serve_for(None)
    await engine.resume("", 7, DIGEST)
    await asyncio.sleep(0.05)
    assert _state(engine) is EngineState.SERVING


async def test_a_pause_that_would_resume_is_fenced_and_its_lease_ends() -> None:
    engine = await _serving(Llm())
    lease = await engine.pause(PauseSpec(), 60)
    await engine.serve_for(0.02)
    await _fenced(engine)
    # Nobody has the lease any more.
    await _until(lambda: not engine._lease.id)
    assert lease.lease_id
    await engine.close()


async def test_a_pause_that_waits_for_a_decision_is_left_to_its_lease() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(_FENCING, 60)
    await engine.serve_for(0)
    await asyncio.sleep(0.05)
    assert _state(engine) is EngineState.PAUSED
    # Who decides has read the register, and says so first.
    await engine.serve_for(60)
    await engine.resume(lease.lease_id, 7, DIGEST)
    assert _state(engine) is EngineState.SERVING
    lease = await engine.pause(_FENCING, 60)
    await engine.serve_for(0)
    await engine.resume(lease.lease_id, 7, DIGEST)
    await _fenced(engine)
    await engine.close()


async def test_time_that_is_over_while_vllm_starts_counts() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.fence("for a test")
    go = asyncio.Event()
    start, llm.resume_generation = llm.resume_generation, go.wait  # type: ignore[method-assign,assignment] # a slow vLLM
    resuming = asyncio.create_task(engine.resume("", 7, DIGEST))
    await engine.serve_for(0)
    await asyncio.sleep(0.02)
    go.set()
    await resuming
    await _fenced(engine)
    llm.resume_generation = start  # type: ignore[method-assign]
    await _until(lambda: llm.log[-1] == ("keep", False))


async def test_only_who_drives_an_engine_says_for_how_long_it_serves() -> None:
    with tempfile.TemporaryDirectory(prefix="wb") as folder:
        first, second = (BridgeEngine(f"unix:{folder}/s") for _ in range(2))
        async with _bridge(Llm(), folder) as engine:
            await first.hello()
            await first.resume("", 7, DIGEST)
            await first.serve_for(60)
            limited = engine._limit._until
            await second.serve_for(None)
            await second.serve_for(0)
            await first.health()
            await first._stub.Health(pb.HealthRequest(serve_for=duration(0)))
            assert engine._limit._until == limited
            # A server that has just come leaves it until it knows.
            first._ownership.close()
            await second.hello()
            assert engine._limit._until == limited
            await first.serve_for(0)
            await asyncio.sleep(0.05)
            assert _state(engine) is EngineState.SERVING
            await second.serve_for(None)
            assert not engine._limit.over
            await second.serve_for(-1)
            await _fenced(engine)
        await first.close()
        await second.close()


@pytest.mark.parametrize("seconds", [1e-9, 3e9])
async def test_any_duration_is_taken(seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="wb") as folder:
        server = BridgeEngine(f"unix:{folder}/s")
        async with _bridge(Llm(), folder) as engine:
            await server.hello()
            await server.serve_for(seconds)
            assert engine._limit.over is (seconds < 1)
        await server.close()
