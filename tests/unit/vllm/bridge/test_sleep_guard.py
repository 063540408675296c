"""Sleep mode beside our pauses and fences: what is told of it is true, whoever asked for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.vllm.bridge.test_adapter import (
    DIGEST,
    Core,
    Llm,
    _refused,
    _serving,
    _state,
    _until,
)
from weightsync.engine import EngineState, PauseSpec
from weightsync.errors import Reason
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync.vllm.bridge.resume_guard import SLEEP_MODE


class Memory(Core):
    """Sleeps as vLLM 0.32 does: its scheduler stands, and what memory it lacks has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.lacks: set[str] = set()
        self.stepped_without_memory = False
        self.woken.set()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        async def sleep() -> None:
            self._paused = True
            if level:
                self.lacks |= {"weights", "kv_cache"}

        if mode == "drain":
            raise ValueError(f"Invalid pause mode: {mode}")
        await self._ask(sleep, turns=2)

    async def release_kv_cache_memory(self) -> None:
        if not self._paused:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        self.lacks.add("kv_cache")

    async def is_sleeping(self) -> bool:
        async def sleeping() -> bool:
            return self._paused or bool(self.lacks)

        return bool(await self._ask(sleeping, turns=2))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        async def wake_up() -> bool:
            self.log.append("wake up")
            if self.lacks:
                await self.woken.wait()
            self.lacks -= self.lacks if tags is None else set(tags)
            self._paused = self._paused and bool(self.lacks)
            return not self.lacks

        return bool(await self._ask(wake_up, turns=2))

    async def pause_generation(self) -> None:
        await self.pause_scheduler_async(mode="abort", clear_cache=True)

    async def resume_generation(self) -> None:
        await self._call_utility_async("resume_scheduler", engine=b"")

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        assert method == "resume_scheduler"
        await Core.resume_generation(self)
        self.stepped_without_memory |= bool(self.lacks)


async def _sleeping(engine: VllmEngine) -> bool:
    return (await engine.health()).sleeping


async def test_one_that_slept_with_all_its_memory_takes_no_step_behind_a_fence() -> None:
    llm = Memory()
    engine = await _serving(llm)
    await llm.sleep(0)
    await engine.fence("what is live did not count")
    llm.steps = 0
    llm.log.clear()
    assert await llm.wake_up() is True
    assert await _sleeping(engine) is False
    assert llm.steps == 0
    assert llm.log == []
    await engine.resume("", 7, DIGEST)
    await _until(lambda: llm.steps)


async def test_memory_that_is_lacking_is_asked_for_whatever_level_came_last() -> None:
    llm = Memory()
    engine = await _serving(llm)
    await llm.sleep(1)
    await llm.sleep(0)
    await engine.fence("test")
    llm.woken.clear()
    waking = asyncio.ensure_future(llm.wake_up())
    await _until(lambda: "wake up" in llm.log)
    llm.steps = 0
    await asyncio.sleep(0.01)
    llm.woken.set()
    assert await waking is True
    assert not llm.lacks
    assert llm.steps == 0


async def test_an_engine_that_slept_with_all_its_memory_is_awake_when_it_was_resumed() -> None:
    llm = Memory()
    engine = await _serving(llm)
    await llm.sleep(0)
    assert await _sleeping(engine) is True
    await llm.resume_generation()
    assert await _sleeping(engine) is False
    await llm.sleep(1)
    await llm.resume_generation()
    assert await _sleeping(engine) is True, "vLLM starts it, and gives it no memory"


async def test_memory_of_keys_that_was_given_back_is_woken_behind_a_fence() -> None:
    llm = Memory()
    engine = await _serving(llm)
    await llm.pause_generation()
    await llm.release_kv_cache_memory()
    await engine.fence("test")
    await llm.wake_up(tags=["kv_cache"])
    assert not llm.lacks
    assert await _sleeping(engine) is False


async def test_an_engine_whose_keys_have_no_memory_is_not_paused_and_started() -> None:
    llm = Memory()
    engine = await _serving(llm)
    await llm.pause_generation()
    await llm.release_kv_cache_memory()
    assert (await _refused(engine.pause(PauseSpec(), 10))).reason is Reason.ENGINE_ASLEEP
    await llm.wake_up()
    lease = await engine.pause(PauseSpec(), 10)
    await engine.resume(lease.lease_id, 7, DIGEST)
    assert not llm.stepped_without_memory


async def test_what_an_older_vllm_does_not_have_it_does_not_get() -> None:
    llm = Llm()
    await _serving(llm)
    assert not hasattr(llm, "release_kv_cache_memory")


@pytest.mark.parametrize("call", [("sleep", 2, "abort"), *((name,) for name in SLEEP_MODE)])
async def test_an_engine_core_is_not_asked_to_sleep_or_wake_up_unseen(
    call: tuple[Any, ...],
) -> None:
    llm = Llm()
    engine = await _serving(llm)
    for fenced in (False, True):
        if fenced:
            await engine.fence("test")
        llm.log.clear()
        error = await _refused(llm.engine_core._call_utility_async(*call, engine=b""))
        assert error.reason is Reason.ENGINE_REFUSED
        assert error.message.startswith(f"call {call[0]} of AsyncLLM instead of")
        assert llm.log == []
    # What the sentence says helps.
    await llm.sleep()
    await llm.wake_up()
    assert "wake up" in llm.log
    assert await _sleeping(engine) is False


async def test_one_that_slept_before_the_bridge_came_can_be_woken() -> None:
    llm = Memory()
    await llm.sleep()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    assert await _sleeping(engine) is True
    assert (await _refused(engine.resume("", 7, DIGEST))).reason is Reason.ENGINE_ASLEEP
    await llm.wake_up()
    assert not llm.lacks
    assert await _sleeping(engine) is False
    assert _state(engine) is EngineState.UNRECONCILED


async def test_a_pause_of_before_the_bridge_is_no_sleep_where_no_memory_can_be_taken() -> None:
    llm = Memory()
    llm.vllm_config.model_config.enable_sleep_mode = False
    await llm.pause_generation()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    assert await _sleeping(engine) is False


async def test_a_wake_up_whose_caller_gives_up_goes_to_its_end() -> None:
    llm = Memory()
    engine = await _serving(llm)
    await llm.sleep()
    llm.woken.clear()
    waking = asyncio.ensure_future(llm.wake_up())
    await _until(lambda: "wake up" in llm.log)
    waking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waking
    # What comes behind it waits for it.
    again = asyncio.ensure_future(llm.sleep())
    llm.woken.set()
    await again
    assert await _sleeping(engine) is True
    assert await llm.wake_up() is True
    assert await _sleeping(engine) is False


async def test_a_sleep_whose_caller_gives_up_before_it_begins_does_not_begin() -> None:
    llm = Memory()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(llm.sleep(), 0.02)
    await engine.resume(lease.lease_id, 7, DIGEST)
    await asyncio.sleep(0.02)
    assert not llm.lacks
    assert await _sleeping(engine) is False
    await llm.sleep()
    assert llm.lacks


@pytest.mark.parametrize("fenced", [False, True])
async def test_a_sleep_that_vllm_has_refused_is_none(fenced: bool) -> None:
    llm = Memory()
    engine = await _serving(llm)
    if fenced:
        await engine.fence("test")
    with pytest.raises(ValueError, match="Invalid pause mode"):
        await llm.sleep(mode="drain")
    assert await _sleeping(engine) is False


async def test_a_sleep_that_vllm_has_begun_and_not_done_is_one() -> None:
    class Fails(Memory):
        async def sleep(self, level: int = 1, mode: str = "abort") -> None:
            await super().sleep(level, mode)
            raise RuntimeError("a rank has no room on the host")

    llm = Fails()
    engine = await _serving(llm)
    with pytest.raises(RuntimeError, match="no room"):
        await llm.sleep()
    assert await _sleeping(engine) is True
    await llm.wake_up()
    assert not llm.lacks
    assert await _sleeping(engine) is False


async def test_memory_that_vllm_did_not_give_back_is_known_at_the_next_resume() -> None:
    llm = Memory()
    engine = await _serving(llm)
    with pytest.raises(RuntimeError, match="requires a completed pause"):
        await llm.release_kv_cache_memory()
    assert await _sleeping(engine) is False

    async def refuse() -> None:
        raise RuntimeError("requests wait")

    engine._sleep._vllm["release_kv_cache_memory"] = refuse
    await llm.pause_generation()
    with pytest.raises(RuntimeError, match="requests wait"):
        await llm.release_kv_cache_memory()
    await llm.resume_generation()
    assert await _sleeping(engine) is False
