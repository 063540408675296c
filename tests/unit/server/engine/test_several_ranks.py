"""Applies on an in-memory engine of several ranks: one that fails fails them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import Engine, Plant, hurry, plant, tensors
from weightsync.engine import EngineState, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

_NAMES = ["0/0/0", "0/0/1", "0/0/2"]
_STEPS = pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS)


@pytest.fixture
async def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    hurry(monkeypatch)
    async with plant(tmp_path, Engine(tmp_path / "segments.sock", ranks=3)) as made:
        await made.ready()
        yield made


def _live(it: Plant) -> list[dict[str, bytes]]:
    return [dict(rank.live) for rank in it.engine.ranks]


def _fail_once(it: Plant, number: int) -> None:
    """Have the next write of a rank put something else into tensor b."""
    rank = it.engine.ranks[number]
    write = rank.write

    def wrong(written: Mapping[str, bytes]) -> None:
        write(written)
        rank.live["b"] = bytes(64)
        rank.write = write  # type: ignore[method-assign]

    rank.write = wrong  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("pause", [pb.PauseOptions(), _STEPS], ids=["pause", "between steps"])
async def test_every_rank_takes_a_version_and_gives_it_back(it: Plant, pause: Any) -> None:
    await it.push(2)
    # The load plan of a new layout takes a pause of its own.
    report = await it.apply(2, pause=pause)
    assert [rank.rank for rank in report.ranks] == _NAMES
    assert _live(it) == [tensors(2)] * 3
    assert (await it.verify()).verified
    assert (await it.rollback(pause=pause)).report.version == 1
    assert _live(it) == [tensors(1)] * 3
    assert it.engine._condition is EngineState.SERVING


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("pause", [pb.PauseOptions(), _STEPS], ids=["pause", "between steps"])
async def test_one_rank_that_fails_takes_all_of_them_back(
    it: Plant, number: int, pause: Any
) -> None:
    await it.push(2)
    _fail_once(it, number)
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(2, pause=pause)
    assert caught.value.reason is Reason.APPLY_RESTORED
    assert _live(it) == [tensors(1)] * 3
    assert it.engine._condition is EngineState.SERVING
    # Nothing is left of it: the next try is good.
    await it.apply(2, pause=pause, clear_rejected=True)
    assert _live(it) == [tensors(2)] * 3


async def test_one_rank_that_holds_something_else_is_named(it: Plant) -> None:
    it.engine.ranks[2].live["b"] = bytes(64)
    answer = await it.verify()
    assert not answer.verified
    assert [rank.rank for rank in answer.ranks if rank.error] == ["0/0/2"]


async def test_ranks_that_hold_different_versions_do_not_resume(it: Plant) -> None:
    await it.push(2)
    digest = it.here.model.table.get(1).content_digest
    lease = await it.engine.pause(PauseSpec(), 1.0)
    it.engine.ranks[1]._content = "other"
    with pytest.raises(WeightSyncError, match="nothing proved"):
        await it.engine.resume(lease.lease_id, 1, digest)
    it.engine.ranks[1]._content = digest
    await it.engine.resume(lease.lease_id, 1, digest)
