"""Switches between two steps, seen from the server: no pause, one whole version, every refusal."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import duration_pb2

from tests.unit.server.engine.plant import Plant, plant, tensors
from weightsync.engine import SwitchOutcome
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BETWEEN = pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS)


async def _apply(it: Plant, version: int, **fields: Any) -> pb.ApplyReport:
    return await it.apply(version, pause=BETWEEN, **fields)


async def _refused(it: Plant, version: int, reason: Reason, *parts: str) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await _apply(it, version)
    assert caught.value.reason is reason, caught.value.message
    for part in parts:
        assert part in caught.value.message
    return caught.value


async def test_a_version_becomes_live_without_a_pause(it: Plant) -> None:
    await it.push(2)
    begun = len(it.engine.events)
    report = await _apply(it, 2)
    assert it.engine.events[begun:] == ["switch"]
    assert it.engine.serves == it.engine.version == it.here.model.serving.live == 2
    assert report.outcome == pb.APPLY_OUTCOME_APPLIED
    assert [rank.content_digest for rank in report.ranks] == [report.content_digest]
    assert report.written_bytes == sum(map(len, tensors(2).values()))
    assert report.pause.mode == pb.PAUSE_MODE_BETWEEN_STEPS
    assert report.pause.cache == pb.CACHE_MODE_KEEP
    assert report.phases.pause == report.phases.resume == duration_pb2.Duration()
    assert it.journal.live == (2, 1)
    assert it.journal.last is not None
    assert it.journal.last.event == "DONE"
    assert it.count("weightsync_served_version", rank="0/0/0") == 2
    assert it.leases() == {1: 0, 2: 1}


async def test_the_way_back_needs_no_pause_either(it: Plant) -> None:
    await it.push(2)
    await _apply(it, 2)
    begun = len(it.engine.events)
    answer = await it.rollback(pause=BETWEEN)
    assert it.engine.events[begun:] == ["switch"]
    assert (answer.report.version, answer.rejected_version) == (1, 2)
    assert it.engine.serves == 1


async def test_a_dry_run_shows_the_mode_and_changes_nothing(it: Plant) -> None:
    await it.push(2)
    begun = len(it.engine.events)
    report = await _apply(it, 2, dry_run=True)
    assert report.pause.mode == pb.PAUSE_MODE_BETWEEN_STEPS
    assert report.outcome == pb.APPLY_OUTCOME_PLANNED
    assert it.engine.events[begun:] == []
    assert it.engine.serves == 1


async def test_a_rank_that_writes_wrongly_is_back_on_the_base(it: Plant) -> None:
    await it.push(2)
    it.engine.wrong = [b"x" * 256]
    error = await _refused(it, 2, Reason.APPLY_RESTORED, "version 1 was restored", "a does not")
    assert error.metadata["apply_id"]
    assert it.engine.serves == it.here.model.serving.live == 1
    assert it.here.model.table.get(2).rejected_reason
    assert it.journal.live[0] == 1
    assert it.outcomes() == {"restored": 1}
    assert it.engine.events[-1] == "switch"


async def test_a_base_that_cannot_be_put_back_fences_and_is_placed_again(it: Plant) -> None:
    await it.push(2)
    it.engine.wrong = [b"x" * 256, b"y" * 256]
    await _refused(it, 2, Reason.ENGINE_FENCED)
    assert "fence" in it.engine.events
    await it.ready()
    assert it.engine.serves == it.here.model.serving.live == 1
    assert it.outcomes() == {"fenced": 1}


@pytest.mark.parametrize(
    "lie",
    [
        lambda o: dataclasses.replace(o, replies=[{**o.replies[0], "content_digest": "0" * 32}]),
        lambda o: dataclasses.replace(o, replies=[{**o.replies[0], "apply_id": "another"}]),
        lambda o: dataclasses.replace(o, replies=[{**o.replies[0], "rank": "0/0/9"}]),
        lambda o: dataclasses.replace(o, replies=[]),
        lambda o: dataclasses.replace(o, replies=[*o.replies, *o.replies]),
        lambda o: dataclasses.replace(o, serves=""),
    ],
)
async def test_an_answer_that_is_none_fences_until_the_ranks_are_asked(
    it: Plant, lie: Callable[[SwitchOutcome], SwitchOutcome]
) -> None:
    await it.push(2)
    it.engine.after["switch"] = lie
    await _refused(it, 2, Reason.ENGINE_FENCED)
    del it.engine.after["switch"]
    await it.ready()
    # That is what they hold, and it was proved again.
    assert it.engine.serves == it.here.model.serving.live == 2
    assert it.journal.live == (2, 1)


async def test_ranks_that_hang_are_fenced_and_asked_when_they_return(tmp_path: Path) -> None:
    async with plant(tmp_path, commit_timeout_s=0.1) as it:
        await it.ready()
        await it.push(2)
        going_on = asyncio.Event()
        it.engine.before["switch"] = going_on.wait
        await _refused(it, 2, Reason.ENGINE_FENCED, "did not answer a switch")
        calls = len(it.engine.calls)
        await _refused(it, 2, Reason.ENGINE_FENCED)
        assert not {"prepare", "switch", "commit"} & set(it.engine.calls[calls:])
        del it.engine.before["switch"]
        going_on.set()
        await it.ready()
        # It was fenced before the switch began, which was then refused.
        assert it.engine.serves == it.here.model.serving.live == 1


async def test_an_engine_that_went_away_in_it_is_asked(it: Plant) -> None:
    await it.push(2)

    def lose(outcome: SwitchOutcome) -> SwitchOutcome:
        raise WeightSyncError(Reason.ENGINE_AWAY, f"lost {outcome.serves}")

    it.engine.after["switch"] = lose
    await _refused(it, 2, Reason.ENGINE_FENCED, "lost")
    del it.engine.after["switch"]
    await it.ready()
    assert it.engine.serves == it.here.model.serving.live == 2


async def test_an_old_plugin_is_refused_before_anything_is_done(it: Plant) -> None:
    await it.push(2)
    info = it.keeper._condition.info
    assert info is not None
    object.__setattr__(info, "capabilities", frozenset({"weight_version"}))
    begun = len(it.engine.calls)
    await _refused(it, 2, Reason.ENGINE_REFUSED, "cannot change weights between two steps")
    assert "prepare" not in it.engine.calls[begun:]
    assert it.engine.serves == 1
    # Every other mode is left.
    assert (await it.apply(2)).version == 2


async def test_an_engine_that_serves_something_else_is_asked(it: Plant) -> None:
    await it.push(2)
    it.engine.before["switch"] = lambda: it.engine.restart(tensors(1))
    await _refused(it, 2, Reason.ENGINE_AWAY, "did not begin")
    del it.engine.before["switch"]
    await it.ready()
    assert it.engine.serves == it.here.model.serving.live == 1
