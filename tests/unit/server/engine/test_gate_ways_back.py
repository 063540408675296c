"""A gate that refuses what is live already: the way back fails, or its server dies on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, hurry, plant, probes, shards, until
from tests.unit.server.engine.test_several_engines import NAMES, away, host, serving
from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync_server.engine import Applier

AFTER = pb.GateOptions(when=pb.GATE_WHEN_AFTER)
ROLLING, TOGETHER = pb.ENGINE_ORDER_ROLLING, pb.ENGINE_ORDER_TOGETHER


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, Engine]:
    return {name: Engine(tmp_path / "segments.sock") for name in NAMES}


async def _dead_at(
    dying: pytest.MonkeyPatch, point: str, applier: Applier, call: asyncio.Task[object]
) -> None:
    """Have a server stop working when a call comes to a failpoint, as if it had died there."""
    reached: list[str] = []
    real = failpoints.reach

    async def reach(name: str) -> None:
        await real(name)
        if name == point:
            reached.append(name)
            await asyncio.Event().wait()

    dying.setattr(failpoints, "reach", reach)
    await until(lambda: bool(reached))
    for task in applier._calls._running:
        task.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_way_back_that_fails_is_told_and_tried_again(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine) as it:
        await it.ready()
        await it.push_probed(2, wrong=1)

        async def lose(scores: list[list[float]]) -> list[list[float]]:
            if engine.serves == 2:
                engine.before["prepare"] = away
            return scores

        engine.on_score = lose
        with pytest.raises(WeightSyncError) as caught:
            await it.apply(2, gate=AFTER)
        assert caught.value.reason is Reason.APPLY_RESTORED, caught.value.message
        assert "engine engine stays on version 2, because" in caught.value.message
        assert caught.value.message.endswith("; the server tries that again")
        assert it.here.model.table.get(2).serving == pb.SERVING_LIVE
        engine.before.clear()
        await until(lambda: engine.serves == it.here.model.serving.live == 1)
        assert it.here.model.table.get(2).serving == pb.SERVING_REJECTED


@pytest.mark.parametrize("point", ["gate.refused", "apply.begin", "apply.intent", "apply.pause"])
async def test_what_was_refused_behind_the_resume_is_left_also_by_the_next_server(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    async with plant(tmp_path, engine, durable=True, pause_lease_s=0.6) as it:
        await it.ready()
        await it.push_probed(2, wrong=1)
        scored = asyncio.Event()

        async def note(scores: list[list[float]]) -> list[list[float]]:
            if engine.serves == 2:
                scored.set()
                await asyncio.sleep(0.2)
            return scores

        engine.on_score = note
        call = asyncio.create_task(it.apply(2, gate=AFTER, idempotency_key="k"))
        await asyncio.wait_for(scored.wait(), 10)
        with monkeypatch.context() as dying:
            await _dead_at(dying, point, it.applier, call)
        await it.keeper.stop()
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == it.here.model.serving.live == 1


@pytest.mark.parametrize("when", [pb.GATE_WHEN_BEFORE, pb.GATE_WHEN_AFTER])
async def test_what_the_last_of_a_rolling_apply_refuses_the_next_server_leaves_too(
    tmp_path: Path,
    engines: dict[str, Engine],
    monkeypatch: pytest.MonkeyPatch,
    when: pb.GateWhen.ValueType,
) -> None:
    async with serving(tmp_path, engines) as it:
        await it.here.push(shards(2), 2, probes=probes(2))
        scored = asyncio.Event()

        async def off(scores: list[list[float]]) -> list[list[float]]:
            if engines["a"].serves == 2:
                scored.set()
                await asyncio.sleep(0.2)
            return [[one - 1 for one in each] for each in scores]

        engines["c"].on_score = off
        gate = pb.GateOptions(when=when, each_engine=True)
        call = asyncio.create_task(it.apply(2, gate=gate, order=ROLLING))
        await asyncio.wait_for(scored.wait(), 10)
        with monkeypatch.context() as dying:
            await _dead_at(dying, "apply.begin", it.applier, call)
    async with host(tmp_path, engines) as it:
        await it.all_serve(1)
        assert it.here.model.table.get(2).serving == pb.SERVING_REJECTED


@pytest.mark.parametrize("order", [TOGETHER, ROLLING])
async def test_engines_leave_it_also_with_the_next_server(
    tmp_path: Path,
    engines: dict[str, Engine],
    monkeypatch: pytest.MonkeyPatch,
    order: pb.EngineOrder.ValueType,
) -> None:
    async with serving(tmp_path, engines) as it:
        await it.here.push(shards(2), 2, probes=probes(2, wrong=1))
        scored = asyncio.Event()

        async def note(scores: list[list[float]]) -> list[list[float]]:
            if engines["a"].serves == 2:
                scored.set()
                await asyncio.sleep(0.2)
            return scores

        engines["a"].on_score = note
        call = asyncio.create_task(it.apply(2, gate=AFTER, order=order))
        await asyncio.wait_for(scored.wait(), 10)
        with monkeypatch.context() as dying:
            await _dead_at(dying, "apply.begin", it.applier, call)
    async with host(tmp_path, engines) as it:
        await it.all_serve(1)


async def test_an_engine_that_was_away_does_not_come_to_what_was_refused(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines) as it:
        await it.here.push(shards(2), 2, probes=probes(2, wrong=1))
        await it.lose("c")
        with pytest.raises(WeightSyncError, match="unlike its trainer"):
            await it.apply(2, gate=AFTER)
        begun = len(engines["c"].served)
        engines["c"].before.clear()
        await it.settled()
        await it.all_serve(1)
        assert 2 not in engines["c"].served[begun:]


@pytest.mark.parametrize(
    ("action", "when", "ended"),
    [
        (pb.GATE_ACTION_ROLL_BACK, pb.GATE_WHEN_BEFORE, "rolled_back"),
        (pb.GATE_ACTION_HOLD, pb.GATE_WHEN_BEFORE, "held"),
        (pb.GATE_ACTION_HOLD, pb.GATE_WHEN_AFTER, "held"),
    ],
)
async def test_a_call_that_is_repeated_to_the_next_server_is_told_how_its_gate_ended(
    tmp_path: Path,
    engine: Engine,
    action: pb.GateAction.ValueType,
    when: pb.GateWhen.ValueType,
    ended: str,
) -> None:
    gate, said = pb.GateOptions(when=when, on_fail=action), []
    for start in range(2):
        async with plant(tmp_path, engine, durable=True) as it:
            await it.ready()
            if not start:
                await it.push_probed(2, wrong=1)
            with pytest.raises(WeightSyncError) as caught:
                await it.apply(2, gate=gate, idempotency_key="k")
            assert caught.value.metadata.get("gate") == ended
            said.append(caught.value.message)
    assert said[0] == said[1]


async def test_the_way_back_is_kept_while_a_gate_scores_behind_the_resume(
    tmp_path: Path, engine: Engine
) -> None:
    async with plant(tmp_path, engine, slots=2) as it:
        await it.bring(2)
        await it.push_probed(3, wrong=1)

        async def push(scores: list[list[float]]) -> list[list[float]]:
            if engine.serves == 3:
                await it.push(4)
            return scores

        engine.on_score = push
        with pytest.raises(WeightSyncError) as caught:
            await it.apply(3, gate=AFTER)
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert "stays on" not in caught.value.message
        assert engine.serves == 2


@pytest.mark.parametrize("action", [pb.GATE_ACTION_ROLL_BACK, pb.GATE_ACTION_HOLD])
async def test_a_rollback_does_not_go_to_what_was_refused_under_another_number(
    tmp_path: Path, engine: Engine, action: pb.GateAction.ValueType
) -> None:
    async with plant(tmp_path, engine, durable=True, slots=4) as it:
        await it.bring(2, 3)
        assert it.keeper.served.rollback_to == 2
        await it.push_probed(2, version=4, wrong=0)
        with pytest.raises(WeightSyncError, match="unlike its trainer"):
            await it.apply(4, gate=pb.GateOptions(on_fail=action))
        assert it.keeper.served.rollback_to == 1
        await it.rollback()
        assert engine.serves == 1
