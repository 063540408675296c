"""Two engine cores of one vLLM that step together, as those of a mixture of experts do.

The stand-in follows vLLM's DPEngineCoreProc: a pause is complete when every core has been asked for
one, a resume is a barrier and is refused while a pause is in flight. The same engine adapter drives
dense cores of a real vLLM in tests/faults/test_stages_vllm.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _refused, _state, _until
from weightsync.engine import BETWEEN_STEPS, CacheUse, EngineState, PauseSpec, SwitchOrder
from weightsync.errors import Reason
from weightsync.vllm.bridge.adapter import VllmEngine

OTHER = "cd" * 16


class Core:
    """One engine core; `log` is the whole vLLM's."""

    def __init__(self, index: int, log: list[Any]) -> None:
        self.index = index
        self.log = log
        self.group: list[Core] = []
        self.pending = False
        self.paused = False
        self.resuming = False
        self.digest = DIGEST
        #: What it holds after a commit.
        self.writes = OTHER
        self.label = ""
        #: What calls of a utility raise, and whether each does, or the next one only.
        self.fail: dict[str, Exception] = {}
        self.broken = False
        #: How long a worker call lasts, seconds.
        self.slow = 0.0
        self.name = f"{index}/0/0"

    async def call(self, utility: str, args: tuple[Any, ...]) -> Any:
        self.log.append((utility, self.index))
        if utility in self.fail:
            raise self.fail[utility] if self.broken else self.fail.pop(utility)
        return await getattr(self, f"_{utility}")(*args)

    async def _pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.pending = True
        while not all(core.pending or core.paused for core in self.group):  # noqa: ASYNC110 - as vLLM
            await asyncio.sleep(0.001)
        self.pending, self.paused = False, True
        self.log.append(("stands", self.index))

    async def _resume_scheduler(self) -> None:
        if self.pending:
            raise RuntimeError("resume_scheduler called while pause is still in flight")
        self.resuming = True
        while not all(core.resuming for core in self.group):  # noqa: ASYNC110 - as vLLM
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.005)
        self.resuming = self.paused = False
        self.log.append(("steps", self.index))

    async def _set_weight_version(self, label: str) -> None:
        assert self.paused
        self.label = label

    async def _collective_rpc(
        self, method: str, _timeout: None, args: tuple[dict[str, Any]], _kwargs: None
    ) -> list[dict[str, Any]]:
        await asyncio.sleep(self.slow)
        if method == "weightsync_commit":
            assert all(core.paused for core in self.group), "one is written while one steps"
            self.digest = self.writes
            self.log.append(("written", self.index))
        call = {"rank": self.name, "call": args[0]["call"]}
        return [{"ok": True, **call, "content_digest": self.digest}]


class Replicas(Llm):
    """AsyncLLM over two such cores."""

    def __init__(self) -> None:
        super().__init__(
            parallel={
                "data_parallel_size": 2,
                "data_parallel_index": 0,
                "tensor_parallel_size": 1,
            }
        )
        self.core_engines = (0, 1)
        self.cores = [Core(index, self.log) for index in self.core_engines]
        for core in self.cores:
            core.group = self.cores

    async def call_utility_all_async(self, utility: str, *args: Any) -> list[Any]:
        one = self._call_utility_async
        return await asyncio.gather(*(one(utility, *args, engine=at) for at in self.core_engines))

    async def _call_utility_async(self, method: str, *args: Any, engine: Any) -> Any:
        return await self.cores[engine].call(method, args)

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        await self.call_utility_all_async("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self.call_utility_all_async("resume_scheduler")

    async def update_weight_version(self, label: str) -> None:
        await self.call_utility_all_async("set_weight_version", label)

    def order(self, *words: str) -> list[str]:
        """Return what was done, by any core, of these things."""
        return [word for word, _ in self.log if word in words]


@pytest.fixture
async def llm() -> Replicas:
    return Replicas()


@pytest.fixture
async def engine(llm: Replicas) -> VllmEngine:
    made = VllmEngine(llm, "0.32.0", "bridge")
    await made.start()
    await made.resume("", 1, DIGEST)
    llm.log.clear()
    return made


async def _paused(engine: VllmEngine) -> str:
    return (await engine.pause(PauseSpec(cache=CacheUse.KEEP), 10)).lease_id


async def _commit(engine: VllmEngine) -> list[dict[str, Any]]:
    return await engine.call_workers("weightsync_commit", {"apply_id": "new", "version": 2})


async def test_all_stand_before_one_is_written_and_all_are_written_before_one_steps(
    llm: Replicas, engine: VllmEngine
) -> None:
    llm.cores[1].slow = 0.02
    lease = await _paused(engine)
    assert [reply["rank"] for reply in await _commit(engine)] == ["0/0/0", "1/0/0"]
    assert await engine.resume(lease, 2, OTHER) is True
    assert llm.order("stands", "written", "set_weight_version", "resume_scheduler", "steps") == [
        word
        for word in ("stands", "written", "set_weight_version", "resume_scheduler", "steps")
        for _ in llm.cores
    ]
    assert [core.label for core in llm.cores] == ["2", "2"]
    assert _state(engine) is EngineState.SERVING


async def test_ranks_of_all_cores_are_told(engine: VllmEngine) -> None:
    info = await engine.hello()
    assert info.ranks == ("0/0/0", "1/0/0")
    assert info.refusals == ()


async def test_one_core_that_holds_something_else_keeps_all_from_going_on(
    llm: Replicas, engine: VllmEngine
) -> None:
    lease = await _paused(engine)
    llm.cores[1].writes = DIGEST
    assert [reply["content_digest"] for reply in await _commit(engine)] == [OTHER, DIGEST]
    error = await _refused(engine.resume(lease, 2, OTHER))
    assert error.reason is Reason.ENGINE_REFUSED
    llm.cores[1].writes, llm.cores[1].name = OTHER, "0/0/0"
    replies = await _commit(engine)
    assert [reply.get("error", "") for reply in replies] == ["", "answered as rank '0/0/0'"]
    assert (await _refused(engine.resume(lease, 2, OTHER))).reason is Reason.ENGINE_REFUSED
    assert "steps" not in llm.order("steps")


async def test_a_core_that_dies_in_a_commit_fences_all(llm: Replicas, engine: VllmEngine) -> None:
    lease = await _paused(engine)
    llm.cores[0].fail["collective_rpc"] = RuntimeError("engine core died")
    llm.cores[1].slow = 0.05
    assert (await _refused(_commit(engine))).reason is Reason.ENGINE_AWAY
    assert _state(engine) is EngineState.FENCED
    # What the other one answers later is the answer to nothing.
    await _until(lambda: llm.order("written"))
    again = await _refused(engine.call_workers("weightsync_state", {}))
    assert "engine core died" in again.message
    assert (await _refused(engine.resume(lease, 2, OTHER))).reason is Reason.ENGINE_REFUSED
    assert (await _refused(engine.resume("", 2, OTHER))).reason is Reason.ENGINE_AWAY
    assert not llm.order("resume_scheduler")


async def test_a_pause_that_one_core_does_not_do_counts_for_none(
    llm: Replicas, engine: VllmEngine
) -> None:
    llm.cores[1].fail["pause_scheduler"] = RuntimeError("no")
    error = await _refused(_paused(engine))
    assert error.reason is Reason.ENGINE_FENCED
    assert "an engine core of vLLM failed in a pause" in error.message
    assert _state(engine) is EngineState.FENCED
    assert (await _refused(_commit(engine))).reason is Reason.ENGINE_REFUSED
    # Nobody was resumed; all are stopped again, and then may go on.
    await _until(lambda: all(core.paused for core in llm.cores))
    assert not llm.order("resume_scheduler")
    await _until(lambda: not engine._generation.generating)
    await engine.resume("", 1, DIGEST)
    assert _state(engine) is EngineState.SERVING


async def test_a_pause_that_some_core_never_does_stays_a_fence(
    llm: Replicas, engine: VllmEngine
) -> None:
    llm.cores[1].fail["pause_scheduler"] = RuntimeError("no")
    llm.cores[1].broken = True
    await _refused(_paused(engine))
    await _until(lambda: len(llm.order("pause_scheduler")) == 4)
    await asyncio.sleep(0.01)
    assert (await _refused(_commit(engine))).reason is Reason.ENGINE_REFUSED
    # A start stops all of them first.
    assert (await _refused(engine.resume("", 1, DIGEST))).reason is Reason.ENGINE_FENCED
    assert not llm.order("resume_scheduler")


async def test_a_resume_that_one_core_does_not_do_stops_all(
    llm: Replicas, engine: VllmEngine
) -> None:
    lease = await _paused(engine)
    llm.cores[0].fail["resume_scheduler"] = RuntimeError("no")
    error = await _refused(engine.resume(lease, 1, DIGEST))
    assert error.reason is Reason.ENGINE_FENCED
    assert _state(engine) is EngineState.FENCED
    await _until(lambda: len(llm.order("pause_scheduler")) == 4)
    assert not llm.order("steps")


async def test_a_label_that_one_core_does_not_take_starts_none(
    llm: Replicas, engine: VllmEngine
) -> None:
    lease = await _paused(engine)
    llm.cores[0].fail["set_weight_version"] = RuntimeError("no")
    assert (await _refused(engine.resume(lease, 1, DIGEST))).reason is Reason.ENGINE_FENCED
    assert not llm.order("resume_scheduler")


async def test_nothing_changes_between_two_steps(llm: Replicas, engine: VllmEngine) -> None:
    assert BETWEEN_STEPS not in (await engine.hello()).capabilities
    error = await _refused(engine.switch(SwitchOrder("new", "old", 2, OTHER, DIGEST, 30.0)))
    assert error.reason is Reason.ENGINE_REFUSED
    assert "data parallel" in error.message
    assert not llm.order("collective_rpc")


async def test_pipeline_stages_do_not_change_between_two_steps_either() -> None:
    llm = Llm(parallel={"pipeline_parallel_size": 2, "tensor_parallel_size": 1})
    engine = VllmEngine(llm, "0.32.0", "bridge")
    info = await engine.hello()
    assert info.ranks == ("0/0/0", "0/1/0")
    assert BETWEEN_STEPS not in info.capabilities
    assert BETWEEN_STEPS in (await VllmEngine(Llm(), "0.32.0", "bridge").hello()).capabilities
