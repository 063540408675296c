"""When the bridge moves an engine's keys, over test_adapter's stand-in for vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _refused, _state, _until
from weightsync.engine import CACHE_LINEAGE, CacheUse, EngineState, PauseSpec, SwitchOrder
from weightsync.errors import Reason
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync.vllm.lineage.core_hooks import BEGIN, MOVE, SWITCH
from weightsync.vllm.scoring.paused_scores import CAN_SCORE

OTHER = "cd" * 16
KEY, OTHER_KEY = f"weightsync:{DIGEST}", f"weightsync:{OTHER}"


class Keyed(Llm):
    """A vLLM whose EngineCore keeps keys apart."""

    def __init__(self, begun: str = "") -> None:
        super().__init__()
        self.core_engines = (b"",)
        self.begun = begun
        self.moves = True
        self.held = OTHER

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        if method != BEGIN:
            return await super()._call_utility_async(method, *args, engine=engine)
        self.log.append((method, *args))
        return self.begun

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method == CAN_SCORE:
            return ""
        self.log.append((method, *args))
        if method == MOVE:
            if not self.moves:
                raise RuntimeError("no")
            return {"cut": 2, "moved": 1}
        replies = await self.collective_rpc(args[0], (args[1],))
        replies = [reply | {"content_digest": self.held} for reply in replies]
        return [*replies, {"cut": 1, "key": OTHER_KEY if self.held == OTHER else KEY}]


async def _serving(llm: Llm) -> VllmEngine:
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    await engine.resume("", 7, DIGEST)
    return engine


async def test_keys_begin_as_loaded_and_move_behind_the_label_before_the_first_step() -> None:
    llm = Keyed()
    engine = await _serving(llm)
    assert llm.log == [
        ("keep", False), (BEGIN, "weightsync:loaded"), "weightsync_state",
        "label 7", (MOVE, KEY, True), "resume",
    ]  # fmt: skip
    assert CACHE_LINEAGE in (await engine.hello()).capabilities
    health = await engine.health()
    assert (health.cache_key, health.cut_requests, health.moved_requests) == (KEY, 2, 1)


@pytest.mark.parametrize(
    ("cache", "move"),
    [
        (CacheUse.RECOMPUTE, (MOVE, OTHER_KEY, True)),
        (CacheUse.KEEP, (MOVE, OTHER_KEY, False)),
        (CacheUse.SHARE, (MOVE, KEY, False)),
    ],
)
async def test_a_pause_clears_nothing_and_its_choice_counts_at_the_resume(
    cache: CacheUse, move: Any
) -> None:
    llm = Keyed()
    engine = await _serving(llm)
    llm.log.clear()
    llm.digests = [OTHER, OTHER]
    lease = await engine.pause(PauseSpec(cache=cache), 10)
    await engine.call_workers("weightsync_commit", {"apply_id": "new"})
    await engine.resume(lease.lease_id, 8, OTHER)
    assert llm.log == [("keep", False), "weightsync_commit", "label 8", move, "resume"]


async def test_a_name_that_was_shared_is_not_used_again() -> None:
    llm = Keyed()
    engine = await _serving(llm)
    for digest, cache in ((OTHER, CacheUse.SHARE), (DIGEST, CacheUse.RECOMPUTE)):
        llm.digests = [digest, digest]
        lease = await engine.pause(PauseSpec(cache=cache), 10)
        await engine.call_workers("weightsync_commit", {"apply_id": "new"})
        await engine.resume(lease.lease_id, 8, digest)
    assert llm.log[-2] == (MOVE, f"{KEY}.1", True)


async def test_a_lease_that_runs_out_resumes_with_the_keys_of_what_the_ranks_hold() -> None:
    llm = Keyed()
    engine = await _serving(llm)
    llm.digests = [OTHER, OTHER]
    await engine.pause(PauseSpec(cache=CacheUse.KEEP), 0.05)
    await engine.call_workers("weightsync_commit", {"apply_id": "new"})
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-2:] == [(MOVE, OTHER_KEY, False), "resume"]


async def test_what_resumes_from_a_fence_reads_no_keys_of_before() -> None:
    llm = Keyed()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(cache=CacheUse.KEEP), 10)
    await engine.resume(lease.lease_id, 7, DIGEST)
    await engine.fence("it is wrong")
    llm.digests = [OTHER, OTHER]
    await engine.resume("", 8, OTHER)
    assert llm.log[-2:] == [(MOVE, OTHER_KEY, True), "resume"]


@pytest.mark.parametrize("held", [OTHER, DIGEST])
async def test_a_switch_moves_in_the_same_call_and_its_answer_counts(held: str) -> None:
    llm = Keyed()
    engine = await _serving(llm)
    llm.log.clear()
    llm.held = held
    order = SwitchOrder("new", "old", 8, OTHER, DIGEST, 30.0, CacheUse.RECOMPUTE)
    await engine.switch(order)
    method, worker_method, args, *rest = llm.log[0]
    assert (method, worker_method, rest) == (
        SWITCH, "weightsync_switch", [[DIGEST, OTHER], OTHER_KEY, True],
    )  # fmt: skip
    assert args["apply_id"] == "new"
    assert llm.log[1:3] == ["weightsync_switch", "label 8"]
    key = OTHER_KEY if held == OTHER else KEY
    assert (await engine.health()).cache_key == key


async def test_an_engine_that_could_not_take_the_keys_stands() -> None:
    llm = Keyed()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 10)
    llm.moves = False
    error = await _refused(engine.resume(lease.lease_id, 7, DIGEST))
    assert error.reason is Reason.ENGINE_AWAY
    assert llm.log[-2:] == ["resume", ("keep", False)]
    # What lies under its name is not known.
    llm.moves = True
    await engine.resume(lease.lease_id, 7, DIGEST)
    assert llm.log[-2:] == [(MOVE, f"{KEY}.1", True), "resume"]


async def test_a_switch_that_failed_gives_up_no_name() -> None:
    llm = Keyed()
    engine = await _serving(llm)
    llm.held = DIGEST
    await engine.switch(SwitchOrder("new", "old", 8, OTHER, DIGEST, 30.0))
    for digest, cache in ((OTHER, CacheUse.SHARE), (DIGEST, CacheUse.RECOMPUTE)):
        llm.digests = [digest, digest]
        lease = await engine.pause(PauseSpec(cache=cache), 10)
        await engine.call_workers("weightsync_commit", {"apply_id": "new"})
        await engine.resume(lease.lease_id, 9, digest)
    assert llm.log[-2] == (MOVE, f"{KEY}.1", True)


async def test_a_fence_ends_what_a_pause_wanted_to_keep() -> None:
    llm = Keyed()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(cache=CacheUse.KEEP), 10)
    await engine.fence("it is wrong")
    llm.digests = [OTHER, OTHER]
    await engine.resume("", 8, OTHER)
    assert llm.log[-2:] == [(MOVE, OTHER_KEY, True), "resume"]


async def test_without_the_hooks_each_request_gets_a_name_when_it_comes() -> None:
    llm = Keyed(begun="this vLLM has no Scheduler.running")
    salts: list[str] = []
    llm.output_processor.add_request = lambda request: salts.append(request.cache_salt)
    engine = await _serving(llm)
    assert CACHE_LINEAGE not in (await engine.hello()).capabilities
    llm.output_processor.add_request(SimpleNamespace(cache_salt=None))
    llm.log.clear()
    lease = await engine.pause(PauseSpec(), 10)
    # What is in flight cannot be told apart, so that vLLM clears its caches.
    assert llm.log == ["mm", ("keep", True)]
    await engine.resume(lease.lease_id, 7, DIGEST)
    llm.output_processor.add_request(SimpleNamespace(cache_salt=None))
    assert salts == [f"{KEY}.1", f"{KEY}.1"]


async def test_the_setting_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_CACHE_LINEAGE", "0")
    llm = Keyed()
    engine = await _serving(llm)
    assert (await engine.health()).cache_key == ""
    await engine.pause(PauseSpec(), 10)
    assert llm.log[-1] == ("keep", True)
    assert not [call for call in llm.log if call[0] in (BEGIN, MOVE)]
