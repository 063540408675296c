"""What the in-memory engine does as a rank of vLLM does it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from weightsync.engine import EngineState, OnExpiry, OpenApply, PauseSpec, SwitchOrder
from weightsync.errors import Reason, WeightSyncError
from weightsync.testing import MemoryEngine, memory_logprobs
from weightsync.testing.memory_rank import _Prepared

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Held(MemoryEngine):
    """Waits in its first write."""

    def __init__(self, folder: Path) -> None:
        super().__init__({"a": ("U8", (4,), bytes(4))}, folder / "no.sock")
        self.begun, self.go = threading.Event(), threading.Event()
        self.written: list[bytes] = []

    def write(self, tensors: Mapping[str, bytes]) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(20)
        self.written += tensors.values()
        super().write(tensors)


async def test_a_commit_whose_caller_has_gone_is_before_what_is_asked_later(tmp_path: Path) -> None:
    engine = Held(tmp_path)
    for number in (1, 2):
        engine._prepared[str(number)] = _Prepared(str(number), {"a": bytes([number]) * 4})
    first = asyncio.create_task(engine.call_workers("weightsync_commit", {"apply_id": "1"}))
    await asyncio.to_thread(engine.begun.wait, 20)
    # As a server does that dies.
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    later = asyncio.create_task(engine.call_workers("weightsync_commit", {"apply_id": "2"}))
    state = asyncio.create_task(engine.call_workers("weightsync_state", {}))
    await asyncio.sleep(0.05)
    assert not later.done()
    assert not state.done()
    engine.go.set()
    assert (await later)[0]["ok"]
    assert engine.written == [b"\1" * 4, b"\2" * 4]
    assert engine.live == {"a": b"\2" * 4}
    assert not (await state)[0]["dirty"]


class Wrong(Held):
    """Writes something else the first time."""

    def write(self, tensors: Mapping[str, bytes]) -> None:
        first = not self.begun.is_set()
        super().write(tensors)
        if first:
            self.live["a"] = b"mix?"


async def test_a_switch_whose_caller_has_gone_ends_on_one_version(tmp_path: Path) -> None:
    engine = Wrong(tmp_path)
    for number in (1, 2):
        engine._prepared[str(number)] = _Prepared(str(number), {"a": bytes([number]) * 4})
    engine.live, engine._content, engine._dirty = {"a": b"\1" * 4}, "1", False
    engine._condition = EngineState.SERVING
    order = SwitchOrder("2", "1", 2, "2", "1", 5.0)
    switch = asyncio.create_task(engine.switch(order))
    await asyncio.to_thread(engine.begun.wait, 20)
    # As a server does that dies.
    switch.cancel()
    await asyncio.gather(switch, return_exceptions=True)
    state = asyncio.create_task(engine.call_workers("weightsync_state", {}))
    await asyncio.sleep(0.05)
    assert not state.done()
    engine.go.set()
    assert (await state)[0]["content_digest"] == "1"
    assert engine.live == {"a": b"\1" * 4}
    assert engine.version == 0


async def _until(engine: MemoryEngine, state: EngineState) -> None:
    async with asyncio.timeout(5):
        while (await engine.health()).state is not state:  # noqa: ASYNC110 - nobody tells when it changes
            await asyncio.sleep(0.005)


def _pair(tmp_path: Path) -> MemoryEngine:
    engine = MemoryEngine({"a": ("U8", (4,), bytes(4))}, tmp_path / "no.sock", 2)
    for rank in engine.ranks:
        rank._prepared["1"] = _Prepared("1", {"a": b"\1" * 4})
    return engine


async def test_a_pause_that_nobody_ends_resumes_on_what_every_rank_holds(tmp_path: Path) -> None:
    engine = _pair(tmp_path)
    await engine.resume("", 3, "")
    lease = await engine.pause(PauseSpec(), 0.5)
    await engine.call_workers("weightsync_commit", {"apply_id": "1", "version": 4})
    await _until(engine, EngineState.SERVING)
    assert engine.version == 4
    assert engine.events == ["resume", "pause", "commit", "expire"]
    with pytest.raises(WeightSyncError, match="not the current lease"):
        await engine.renew(lease.lease_id, 5)


async def test_a_pause_that_nobody_ends_is_fenced_on_a_mixture(tmp_path: Path) -> None:
    engine = _pair(tmp_path)
    await engine.resume("", 3, "")
    await engine.pause(PauseSpec(), 0.5)
    await engine.ranks[1].call("weightsync_commit", {"apply_id": "1"})
    await _until(engine, EngineState.FENCED)


async def test_a_pause_that_fences_asks_for_its_decision(tmp_path: Path) -> None:
    engine = _pair(tmp_path)
    await engine.resume("", 3, "")
    apply = OpenApply("a1", 3, 4)
    lease = await engine.pause(PauseSpec(on_expiry=OnExpiry.FENCE, apply=apply), 0.5)
    await engine.call_workers("weightsync_commit", {"apply_id": "1", "version": 4})
    await _until(engine, EngineState.FENCED)
    info = await engine.hello()
    assert info.open_apply == (await engine.health()).open_apply == apply
    assert "apply a1 (3 to 4)" in info.reason
    with pytest.raises(WeightSyncError, match="not the current lease"):
        await engine.resume(lease.lease_id, 4, "1")
    await engine.resume("", 4, "1")
    assert (await engine.health()).open_apply is None
    assert engine.events == ["resume", "pause", "commit", "expire", "resume"]


async def test_an_engine_whose_time_is_over_is_fenced_unless_it_waits_for_a_decision(
    tmp_path: Path,
) -> None:
    engine = _pair(tmp_path)
    await engine.resume("", 3, "")
    apply = OpenApply("a1", 3, 4)
    lease = await engine.pause(PauseSpec(on_expiry=OnExpiry.FENCE, apply=apply), 60)
    await engine.call_workers("weightsync_commit", {"apply_id": "1", "version": 4})
    await engine.serve_for(0)
    await asyncio.sleep(0.05)
    assert (await engine.health()).state is EngineState.PAUSED
    # Nobody has said since that it may serve.
    await engine.resume(lease.lease_id, 4, "1")
    health = await engine.health()
    assert health.state is EngineState.FENCED
    assert "weightsync fleet status" in health.reason
    await engine.serve_for(60)
    await engine.resume("", 4, "1")
    await engine.pause(PauseSpec(), 60)
    await engine.serve_for(0.02)
    await _until(engine, EngineState.FENCED)
    assert engine.events[-1] == "overdue"


async def test_scores_are_those_of_what_it_holds(tmp_path: Path) -> None:
    engine = MemoryEngine({"a": ("U8", (4,), bytes(4))}, tmp_path / "no.sock")
    with pytest.raises(WeightSyncError, match="does not generate"):
        await engine.score([[1, 2]], "", 1.0)
    engine._condition = EngineState.SERVING
    sequences = [[1, 2, 3], [3, 2]]
    found = await engine.score(sequences, "", 1.0)
    assert found == [memory_logprobs({"a": bytes(4)}, tokens) for tokens in sequences]
    assert [len(one) for one in found] == [2, 1]
    assert all(-5 <= one < 0 for each in found for one in each)
    assert found != [memory_logprobs({"a": b"\1" * 4}, tokens) for tokens in sequences]
    lease = await engine.pause(PauseSpec(), 5.0)
    assert await engine.score(sequences, lease.lease_id, 1.0) == found
    with pytest.raises(WeightSyncError, match="is not the current lease"):
        await engine.score(sequences, "other", 1.0)

    async def slow(scores: list[list[float]]) -> list[list[float]]:
        await asyncio.sleep(60)
        return scores

    engine.on_score = slow
    with pytest.raises(WeightSyncError, match=r"not scored within 0\.05 s") as caught:
        await engine.score(sequences, lease.lease_id, 0.05)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
