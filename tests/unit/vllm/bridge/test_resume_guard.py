"""Nobody but the bridge starts an engine that must stand still, whichever way of vLLM is taken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.unit.vllm.bridge.test_adapter import DIGEST, Core, Llm, _refused, _serving
from tests.unit.vllm.bridge.test_data_parallel import Replicas
from weightsync.engine import EngineState, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync.vllm.bridge.readiness_gate import ReadinessGate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WAYS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "resume_generation": lambda llm: llm.resume_generation(),
    "the utility itself": lambda llm: llm.engine_core._call_utility_async(
        "resume_scheduler", engine=b""
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_no_way_of_vllm_lifts_a_fence_or_ends_a_pause_of_ours(way: str) -> None:
    llm = Llm()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    assert (await _refused(WAYS[way](llm))).reason is Reason.ENGINE_FENCED
    await engine.resume("", 7, DIGEST)
    lease = await engine.pause(PauseSpec(), 10)
    llm.log.clear()
    error = await _refused(WAYS[way](llm))
    assert error.reason is Reason.APPLY_BUSY
    assert "leave out this resume" in error.message
    await engine.resume(lease.lease_id, 7, DIGEST)
    await engine.fence("two ranks differ")
    error = await _refused(WAYS[way](llm))
    assert error.reason is Reason.ENGINE_FENCED
    assert "(two ranks differ)" in error.message
    # It was resumed by its lease alone.
    assert llm.log.count("resume") == 1
    await engine.close()


@pytest.mark.parametrize("way", WAYS)
async def test_a_pause_of_vllms_own_is_ended_as_before(way: str) -> None:
    llm = Llm()
    engine = await _serving(llm)
    await WAYS[way](llm)
    assert llm.log == ["resume"]
    await engine.close()


async def test_no_resume_comes_behind_a_pause_that_vllm_is_at() -> None:
    llm = Llm()
    engine = await _serving(llm)
    llm.drained.clear()
    pausing = asyncio.ensure_future(engine.pause(PauseSpec(mode="wait", wait_timeout_s=20), 20))
    while not llm.log:  # noqa: ASYNC110 - nobody tells when it is asked
        await asyncio.sleep(0.001)
    assert engine.condition()[0] is EngineState.SERVING
    assert (await _refused(llm.resume_generation())).reason is Reason.APPLY_BUSY
    llm.drained.set()
    await pausing
    assert "resume" not in llm.log
    await engine.close()


async def test_several_engine_cores_are_kept_still_as_one_is() -> None:
    llm = Replicas()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    assert (await _refused(llm.resume_generation())).reason is Reason.ENGINE_FENCED
    await engine.resume("", 7, DIGEST)
    assert not any(core.paused for core in llm.cores)
    await engine.close()


async def test_sleep_mode_still_wakes_an_engine_that_stands_still() -> None:
    llm = Core()
    engine = await _serving(llm)
    await llm.sleep()
    await engine.fence("test")
    llm.woken.set()
    assert await llm.wake_up() is True
    assert not engine._sleep.asleep
    await engine.close()


async def test_an_unknown_client_is_refused_at_once() -> None:
    llm, client = Llm(), SimpleNamespace()
    llm.engine_core = cast("Any", client)
    with pytest.raises(WeightSyncError, match=r"use a vLLM release from 0\.26") as caught:
        VllmEngine(llm, "0.99", "bridge")
    assert caught.value.reason is Reason.ENGINE_UNSUPPORTED


async def test_over_http_a_refused_resume_is_a_conflict_with_its_sentence() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 10)

    async def route(scope: Any, receive: Any, send: Any) -> None:
        """Resume as vLLM's route does, in a task of its own as behind a middleware."""
        try:
            await asyncio.ensure_future(llm.resume_generation())
            status, text = 200, b"resumed"
        except Exception:  # noqa: BLE001 - vLLM's route does that
            status, text = 500, b"Failed to resume generation"
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    gate = ReadinessGate(route, engine.condition)
    await gate({"type": "http", "path": "/resume"}, None, send)
    start, body = sent
    assert start["status"] == 409
    assert b"leave out this resume" in body["body"]
    await engine.close()
