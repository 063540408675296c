"""Switches between two steps in the engine's own process, over test_adapter's stand-in for vLLM."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _refused, _serving, _state, _until
from weightsync.engine import CacheUse, EngineState, PauseSpec, SwitchOrder
from weightsync.errors import Reason

if TYPE_CHECKING:
    from weightsync.vllm.bridge.adapter import VllmEngine

OTHER = "cd" * 16
ORDER = SwitchOrder("new", "old", 8, OTHER, DIGEST, 30.0)


class Switcher(Llm):
    """Its ranks answer a switch as a test wants them to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[dict[str, Any]] = [{"ok": True, "content_digest": OTHER}] * 2

    async def collective_rpc(self, method: str, args: Any = ()) -> list[dict[str, Any]]:
        replies = await super().collective_rpc(method, args)
        if method != "weightsync_switch":
            return replies
        return [reply | more for reply, more in zip(replies, self.answers, strict=True)]


async def _ready() -> tuple[Switcher, VllmEngine]:
    llm = Switcher()
    return llm, await _serving(llm)


async def test_the_label_lies_right_behind_the_switch() -> None:
    llm, engine = await _ready()
    llm.gate.clear()
    task = asyncio.ensure_future(engine.switch(ORDER))
    await _until(lambda: len(llm.log) == 2)
    # It was sent before the ranks had answered.
    assert llm.log == ["weightsync_switch", "label 8"]
    assert engine.live.version == 7
    llm.gate.set()
    outcome = await task
    assert (outcome.serves, outcome.label_set) == (OTHER, True)
    assert [reply["rank"] for reply in outcome.replies] == ["0/0/0", "0/0/1"]
    assert _state(engine) is EngineState.SERVING
    assert engine.live.version == 8
    # What it serves now needs no question.
    llm.log.clear()
    lease = await engine.pause(PauseSpec(cache=CacheUse.KEEP), 10)
    await engine.resume(lease.lease_id, 8, OTHER)
    assert llm.log == [("keep", False), "label 8", "resume"]


async def test_ranks_that_are_back_get_the_old_label_and_go_on() -> None:
    llm, engine = await _ready()
    llm.answers = [{"ok": False, "content_digest": DIGEST, "error": "no"}] * 2
    outcome = await engine.switch(ORDER)
    assert outcome.serves == DIGEST
    assert llm.log == ["weightsync_switch", "label 8", "label 7"]
    assert _state(engine) is EngineState.SERVING
    assert (engine.live.version, engine.live.current.label) == (7, "7")


@pytest.mark.parametrize(
    "answers",
    [
        [{"ok": True, "content_digest": OTHER}, {"ok": False, "content_digest": DIGEST}],
        [{"ok": True, "content_digest": DIGEST}] * 2,
        [{"ok": False, "content_digest": OTHER}] * 2,
        [{"ok": True, "content_digest": ""}] * 2,
        [{"ok": True, "content_digest": OTHER}, {"content_digest": OTHER, "call": "another"}],
        [{"ok": True, "content_digest": OTHER}, {"content_digest": OTHER, "rank": "0/0/0"}],
    ],
)
async def test_ranks_that_do_not_tell_one_version_are_fenced_and_asked(
    answers: list[dict[str, Any]],
) -> None:
    llm, engine = await _ready()
    llm.answers = answers
    assert (await engine.switch(ORDER)).serves == ""
    assert _state(engine) is EngineState.FENCED
    assert llm.log[-2:] == ["label 7", ("keep", False)]
    # Of what made tokens meanwhile, under either label, no number is known.
    assert (engine.live.version, engine.live.current.version) == (0, 0)
    llm.digests = [OTHER, OTHER]
    await engine.resume("", 8, OTHER)
    assert llm.log[-3:] == ["weightsync_state", "label 8", "resume"]
    assert engine.live.version == 8


async def test_a_fence_during_a_switch_that_hangs_lets_no_step_follow_it() -> None:
    llm, engine = await _ready()
    llm.gate.clear()
    task = asyncio.ensure_future(engine.switch(ORDER))
    await asyncio.sleep(0.01)
    await engine.fence("it hangs")
    # The pause is in vLLM's queue while the ranks still work.
    assert llm.log == ["weightsync_switch", "label 8", ("keep", False)]
    error = await _refused(engine.pause(PauseSpec(), 1))
    assert error.reason is Reason.APPLY_BUSY
    llm.gate.set()
    assert (await task).serves == OTHER
    assert engine.condition() == (EngineState.FENCED, "it hangs")


async def test_a_switch_from_what_is_not_served_is_refused() -> None:
    llm, engine = await _ready()
    wrong = SwitchOrder("new", "old", 8, OTHER, OTHER, 30.0)
    assert (await _refused(engine.switch(wrong))).reason is Reason.ENGINE_REFUSED
    lease = await engine.pause(PauseSpec(cache=CacheUse.KEEP), 10)
    assert (await _refused(engine.switch(ORDER))).reason is Reason.APPLY_BUSY
    await engine.resume(lease.lease_id, 7, DIGEST)
    await engine.fence("why")
    assert (await _refused(engine.switch(ORDER))).reason is Reason.ENGINE_REFUSED
    assert "weightsync_switch" not in llm.log


async def test_only_one_switch_at_a_time_and_none_of_a_sleeping_engine() -> None:
    llm, engine = await _ready()
    llm.gate.clear()
    task = asyncio.ensure_future(engine.switch(ORDER))
    await asyncio.sleep(0.01)
    assert (await _refused(engine.switch(ORDER))).reason is Reason.APPLY_BUSY
    going = asyncio.ensure_future(llm.sleep())
    await asyncio.sleep(0.01)
    assert not going.done(), "sleep waits for the switch"
    llm.gate.set()
    await task
    await going
    back = SwitchOrder("old", "new", 9, DIGEST, OTHER, 30.0)
    assert (await _refused(engine.switch(back))).reason is Reason.ENGINE_ASLEEP


async def test_a_failure_inside_vllm_fences_for_good() -> None:
    llm, engine = await _ready()
    llm.fail = RuntimeError("cancelled")
    assert (await _refused(engine.switch(ORDER))).reason is Reason.ENGINE_AWAY
    assert _state(engine) is EngineState.FENCED
    assert engine.live.version == 0


async def test_a_switch_is_no_call_of_workers() -> None:
    llm, engine = await _ready()
    error = await _refused(engine.call_workers("weightsync_switch", {}))
    assert error.reason is Reason.REQUEST_INVALID
    assert llm.log == []


async def test_a_label_that_cannot_be_set_is_told() -> None:
    llm, engine = await _ready()

    async def refuse(label: str) -> None:
        raise RuntimeError(label)

    llm.update_weight_version = refuse  # type: ignore[method-assign]
    outcome = await engine.switch(ORDER)
    assert (outcome.serves, outcome.label_set) == (OTHER, False)
    assert _state(engine) is EngineState.SERVING
