"""The gate of an apply on several engines: one scores for all, and nobody goes before it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, hurry, probes, shards
from tests.unit.server.engine.test_several_engines import NAMES, Host, serving
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path

ROLLING, TOGETHER = pb.ENGINE_ORDER_ROLLING, pb.ENGINE_ORDER_TOGETHER


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def engines(tmp_path: Path) -> dict[str, Engine]:
    return {name: Engine(tmp_path / "segments.sock") for name in NAMES}


async def _push(it: Host, seed: int, *, wrong: int = -1) -> None:
    await it.here.push(shards(seed), seed, probes=probes(seed, wrong=wrong))


def _scores(it: Host) -> dict[str, int]:
    return {name: engine.events.count("score") for name, engine in it.engines.items()}


async def _undone(it: Host, **fields: object) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(2, **fields)
    assert caught.value.reason is Reason.APPLY_RESTORED, caught.value.message
    return caught.value


async def test_together_one_scores_while_all_stand(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines) as it:
        await _push(it, 2)
        standing = []

        async def look(scores: list[list[float]]) -> list[list[float]]:
            standing.append([engine._condition for engine in engines.values()])
            return scores

        engines["a"].on_score = look
        reply = await it.apply(2)
        assert it.serves() == dict.fromkeys(NAMES, 2)
        assert _scores(it) == {"a": 2, "b": 0, "c": 0}
        # First the baseline, while all generate.
        assert standing == [["serving"] * 3, ["paused"] * 3]
        gates = {one.engine: one.report.HasField("gate") for one in reply.engines}
        assert gates == {"a": True, "b": False, "c": False}
        assert reply.report.gate.outcome == pb.GATE_OUTCOME_PASSED
        assert reply.report.phases.score == reply.report.gate.took


@pytest.mark.parametrize("order", [TOGETHER, ROLLING])
@pytest.mark.parametrize("when", [pb.GATE_WHEN_BEFORE, pb.GATE_WHEN_AFTER])
async def test_what_one_refuses_nobody_keeps(
    tmp_path: Path,
    engines: dict[str, Engine],
    order: pb.EngineOrder.ValueType,
    when: pb.GateWhen.ValueType,
) -> None:
    async with serving(tmp_path, engines) as it:
        await _push(it, 2, wrong=1)
        gate = pb.GateOptions(when=when, on_fail=pb.GATE_ACTION_HOLD)
        error = await _undone(it, order=order, gate=gate, max_unavailable=2 * (order == ROLLING))
        assert error.message.startswith("version 2 answers its probes unlike its trainer")
        assert error.message.count("version 1 is served again") == 1
        assert error.metadata["gate"] == "held"
        await it.settled()
        assert it.serves() == dict.fromkeys(NAMES, 1)
        assert it.here.model.serving.live == 1
        assert it.here.model.table.get(2).serving == pb.SERVING_HELD
        if when == pb.GATE_WHEN_BEFORE:
            assert all(2 not in engine.served for engine in engines.values())
        elif order == ROLLING:
            # The first goes alone, however many may be away at once.
            assert [name for name in NAMES if 2 in engines[name].served] == ["a"]


async def test_rolling_the_first_goes_alone_and_the_others_do_not_score(
    tmp_path: Path, engines: dict[str, Engine]
) -> None:
    async with serving(tmp_path, engines) as it:
        await _push(it, 2)
        others = []

        async def look(scores: list[list[float]]) -> list[list[float]]:
            await asyncio.sleep(0.3)
            others.append([engines[name].serves for name in "bc"])
            return scores

        engines["a"].on_score = look
        await it.apply(2, order=ROLLING, max_unavailable=3)
        assert others == [[1, 1]] * 2
        assert it.serves() == dict.fromkeys(NAMES, 2)
        assert _scores(it) == {"a": 2, "b": 0, "c": 0}


@pytest.mark.parametrize("order", [TOGETHER, ROLLING])
async def test_each_engine_scores_where_that_is_asked_for(
    tmp_path: Path, engines: dict[str, Engine], order: pb.EngineOrder.ValueType
) -> None:
    async with serving(tmp_path, engines) as it:
        await _push(it, 2)

        async def off(scores: list[list[float]]) -> list[list[float]]:
            return [[one - 1 for one in each] for each in scores]

        reply = await it.apply(1)
        assert reply.report.outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
        engines["c"].on_score = off
        error = await _undone(it, order=order, gate=pb.GateOptions(each_engine=True))
        assert "unlike its trainer" in error.message
        await it.settled()
        assert it.serves() == dict.fromkeys(NAMES, 1)
        assert set(_scores(it).values()) == {2}
