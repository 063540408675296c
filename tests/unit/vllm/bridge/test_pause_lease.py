"""Leases of pauses when this process, or a clock, stands still."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _refused, _serving, _state, _until
from weightsync import failpoints
from weightsync.engine import EngineState, OnExpiry, OpenApply, PauseSpec
from weightsync.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.vllm.bridge.adapter import VllmEngine


def _renewed(engine: VllmEngine, lease: str) -> object:
    return engine.renew(lease, 60)


def _resumed(engine: VllmEngine, lease: str) -> object:
    return engine.resume(lease, 8, DIGEST)


@pytest.mark.parametrize("again", [_renewed, _resumed])
async def test_a_process_that_stood_still_past_its_lease_finds_it_gone(
    again: Callable[[VllmEngine, str], object],
) -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 0.05)
    # As by SIGSTOP: no timer runs. What came from the server meanwhile is read first.
    time.sleep(0.1)  # noqa: ASYNC251 - the loop itself must stand still
    error = await _refused(again(engine, lease.lease_id))
    assert error.reason is Reason.ENGINE_REFUSED
    assert "not the current lease" in error.message
    # It ends as without a server: on what every rank holds, with its own label.
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-2:] == ["label 7", "resume"]


async def test_what_was_committed_keeps_its_label_when_nobody_resumes() -> None:
    llm = Llm()
    engine = await _serving(llm)
    llm.digests = ["b" * 32] * 2
    await engine.pause(PauseSpec(), 1.5)
    await engine.call_workers("weightsync_commit", {"apply_id": "x", "version": 8})
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-2:] == ["label 8", "resume"]


async def test_a_server_that_tells_no_version_loses_no_label() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 1.5)
    await engine.call_workers("weightsync_commit", {"apply_id": "x"})
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-2:] == ["label 7", "resume"]


def _fencing(apply_id: str = "a1") -> PauseSpec:
    return PauseSpec(on_expiry=OnExpiry.FENCE, apply=OpenApply(apply_id, 7, 8))


async def test_a_pause_that_fences_generates_nothing_when_it_runs_out() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(_fencing(), 0.02)
    assert (await engine.health()).open_apply == OpenApply("a1", 7, 8)
    await _until(lambda: _state(engine) is EngineState.FENCED)
    await asyncio.sleep(0.05)
    # Whatever every rank holds: nobody was asked, and nothing was started.
    assert llm.log == ["mm", ("keep", True)]
    state, reason = engine.condition()
    assert state is EngineState.FENCED
    assert "the pause of apply a1 (7 to 8) timed out before it was decided" in reason
    assert (await engine.hello()).open_apply == OpenApply("a1", 7, 8)
    # It is too late for whoever has come by the lease.
    for late in (engine.renew(lease.lease_id, 60), engine.resume(lease.lease_id, 7, DIGEST)):
        assert (await _refused(late)).reason is Reason.ENGINE_REFUSED
    assert _state(engine) is EngineState.FENCED
    # What was decided is placed, proved and served.
    llm.digests = ["b" * 32] * 2
    await engine.call_workers("weightsync_commit", {"apply_id": "a1", "version": 8})
    await engine.resume("", 8, "b" * 32)
    health = await engine.health()
    assert (health.state, health.open_apply) == (EngineState.SERVING, None)
    assert llm.log[-2:] == ["label 8", "resume"]


async def test_a_pause_that_fences_goes_on_as_any_while_it_is_renewed() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(_fencing(), 1.5)
    for _ in range(4):
        await asyncio.sleep(0.4)
        await engine.renew(lease.lease_id, 1.5)
    assert _state(engine) is EngineState.PAUSED
    await engine.resume(lease.lease_id, 7, DIGEST)
    assert (await engine.health()).open_apply is None
    assert _state(engine) is EngineState.SERVING


async def test_a_pause_that_fences_does_not_wait_for_a_rank_that_hangs() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(_fencing(), 0.02)
    llm.gate.clear()
    hanging = asyncio.create_task(engine.call_workers("weightsync_commit", {"apply_id": "a1"}))
    await _until(lambda: _state(engine) is EngineState.FENCED)
    llm.gate.set()
    await hanging
    await asyncio.sleep(0.02)
    assert _state(engine) is EngineState.FENCED
    assert "resume" not in llm.log


async def test_a_renewal_that_comes_too_late_does_not_lift_the_fence() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(_fencing(), 0.05)
    time.sleep(0.1)  # noqa: ASYNC251 - the loop itself must stand still
    assert (await _refused(engine.renew(lease.lease_id, 60))).reason is Reason.ENGINE_REFUSED
    await _until(lambda: _state(engine) is EngineState.FENCED)
    assert "resume" not in llm.log


async def test_the_end_of_one_pause_does_not_end_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan("bridge.expire=1*sleep(0.3)"))
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(_fencing(), 0.02)
    # It has run out, and what it ends in is on its way.
    await asyncio.sleep(0.1)
    await engine.fence("the server asks every rank what it holds")
    await engine.resume("", 7, DIGEST)
    lease = await engine.pause(_fencing("a2"), 60)
    await asyncio.sleep(0.4)
    assert _state(engine) is EngineState.PAUSED
    await engine.resume(lease.lease_id, 7, DIGEST)
    assert _state(engine) is EngineState.SERVING


async def test_a_resume_that_came_in_time_counts() -> None:
    class Slow(Llm):
        go = asyncio.Event()

        async def resume_generation(self) -> None:
            await self.go.wait()
            await super().resume_generation()

    llm = Slow()
    llm.go.set()
    engine = await _serving(llm)
    lease = await engine.pause(_fencing(), 2.0)
    llm.go.clear()
    # vLLM gets as long for a resume, so that the lease ends first.
    await asyncio.sleep(1.0)
    resuming = asyncio.create_task(engine.resume(lease.lease_id, 7, DIGEST))
    # Requests are refused meanwhile.
    await _until(lambda: _state(engine) is EngineState.FENCED)
    llm.go.set()
    await resuming
    await asyncio.sleep(0.02)
    assert _state(engine) is EngineState.SERVING
    assert (await engine.health()).open_apply is None


@pytest.mark.parametrize("apply", [None, OpenApply("", 7, 8), OpenApply("x" * 65, 7, 8)])
async def test_a_pause_that_fences_names_its_apply(apply: OpenApply | None) -> None:
    llm = Llm()
    engine = await _serving(llm)
    spec = PauseSpec(on_expiry=OnExpiry.FENCE, apply=apply)
    error = await _refused(engine.pause(spec, 1.0))
    assert error.reason is Reason.REQUEST_INVALID
    assert "names its apply in 1 to 64 bytes" in error.message
    assert llm.log == []
    assert _state(engine) is EngineState.SERVING
