"""What GetStatus says of an apply while it runs: its phase, since when, and who is waited for."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, Plant, hurry, plant, until
from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.apply_progress import furthest_behind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

_STEPS = pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS)


@pytest.fixture
async def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    hurry(monkeypatch)
    async with plant(tmp_path, Engine(tmp_path / "segments.sock", ranks=2)) as made:
        await made.ready()
        yield made


@pytest.fixture
def seen(it: Plant, monkeypatch: pytest.MonkeyPatch) -> dict[str, pb.RunningApply]:
    """What was told at each failpoint that the apply has come to, by its name."""
    told: dict[str, pb.RunningApply] = {}

    async def look(name: str) -> None:
        told[name] = it.keeper.status().running_apply

    monkeypatch.setattr(failpoints, "reach", look)
    return told


def _phases(seen: dict[str, pb.RunningApply]) -> dict[str, str]:
    named = {name: pb.RunningPhase.Name(one.phase) for name, one in seen.items()}
    return {name: phase.removeprefix("RUNNING_PHASE_") for name, phase in named.items()}


async def test_each_phase_is_told_while_it_lasts(
    it: Plant, seen: dict[str, pb.RunningApply]
) -> None:
    await it.push(2)
    report = await it.apply(2)
    found = _phases(seen)
    assert [found[f"apply.{at}"] for at in ("begin", "prepared", "intent", "pause")] == [
        *("PREPARE", "WAIT", "PAUSE", "PAUSE"),
    ]
    assert [found[f"apply.{at}"] for at in ("commit", "committed", "resume", "resumed")] == [
        *("COMMIT", "COMMIT", "RESUME", "WAIT"),
    ]
    commit = seen["apply.commit"]
    assert (commit.apply_id, commit.engine) == (report.apply_id, it.keeper.name)
    assert (commit.version, commit.previous_version) == (2, 1)
    assert commit.took.ToNanoseconds() >= commit.in_phase.ToNanoseconds() >= 0
    assert commit.phase_began.ToNanoseconds() >= commit.began.ToNanoseconds() > 0
    assert not it.keeper.status().HasField("running_apply")


async def test_a_switch_between_steps_and_a_way_back_are_told(
    it: Plant, seen: dict[str, pb.RunningApply]
) -> None:
    await it.push(2, 3)
    await it.apply(2, pause=_STEPS)
    assert _phases(seen)["apply.commit"] == "COMMIT"
    seen.clear()
    it.engine.wrong.append(bytes(64))
    with pytest.raises(WeightSyncError):
        await it.apply(3)
    assert _phases(seen)["apply.restore"] == "RESTORE"
    assert seen["apply.restore"].version == 3


async def test_the_rank_that_all_wait_for_is_named(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.push(2)
    slow, go = it.engine.ranks[1], threading.Event()
    tell = slow._tell

    def late(page: str, report: Mapping[str, Any]) -> None:
        # As of a rank of vLLM, the call is answered before.
        threading.Thread(target=lambda: (go.wait(60), tell(page, report))).start()

    monkeypatch.setattr(slow, "_tell", late)
    applying = asyncio.create_task(it.apply(2, prepare_timeout={"seconds": 60}))
    try:
        await until(lambda: it.keeper.status().running_apply.pending_ranks == ["0/0/1"])
        assert it.keeper.status().running_apply.phase == pb.RUNNING_PHASE_PREPARE
    finally:
        go.set()
    await applying
    assert not it.keeper.status().HasField("running_apply")


async def test_a_question_is_no_apply(it: Plant) -> None:
    told: list[bool] = []
    it.engine.before["verify"] = lambda: told.append(it.keeper.status().HasField("running_apply"))
    await it.verify()
    assert told
    assert not any(told)


def test_of_several_engines_that_is_told_which_the_others_wait_for() -> None:
    def engine(name: str, phase: pb.RunningPhase.ValueType, began: int) -> pb.EngineStatus:
        running = pb.RunningApply(engine=name, phase=phase)
        running.phase_began.FromNanoseconds(began)
        return pb.EngineStatus(name=name, running_apply=running)

    a = engine("a", pb.RUNNING_PHASE_WAIT, 1)
    b = engine("b", pb.RUNNING_PHASE_COMMIT, 3)
    c = engine("c", pb.RUNNING_PHASE_COMMIT, 2)
    for all_of in ([a, b, c], [c, b, a]):
        found = furthest_behind([pb.EngineStatus(name="idle"), *all_of])
        assert found is not None
        assert found.engine == "c"
    back = engine("d", pb.RUNNING_PHASE_RESTORE, 9)
    assert (furthest_behind([a, b, back]) or a.running_apply).engine == "d"
    assert (furthest_behind([a]) or b.running_apply).engine == "a"
    assert furthest_behind([pb.EngineStatus(name="idle")]) is None


@pytest.mark.parametrize("phase", sorted(set(pb.RunningPhase.values()) - {0}))
def test_every_phase_has_its_place(phase: pb.RunningPhase.ValueType) -> None:
    one = pb.EngineStatus(running_apply=pb.RunningApply(phase=phase))
    assert furthest_behind([one, one]) == one.running_apply
