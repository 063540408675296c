"""A wall clock that is set back an hour or jumps a day ahead, as NTP may do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.clocks import HOUR, Clocks
from tests.unit.server.world import begin, simple, world
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.ops.tasks import DeadlineMonitor

if TYPE_CHECKING:
    from pathlib import Path

_DAY = 24 * HOUR


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks.over(monkeypatch)


@pytest.mark.parametrize("jump", [-HOUR, _DAY])
async def test_numbers_order_versions_whatever_the_clock_says(
    tmp_path: Path, clocks: Clocks, jump: float
) -> None:
    dates = {}
    async with world(tmp_path, retention=Retention(3), slots=2) as here:
        for version in range(1, 6):
            await here.push(simple(version), version)
            # What it said is told as it is, and nothing follows from it.
            dates[version] = clocks.wall
            clocks.let_pass(1)
            clocks.wall += jump
        for _ in range(200):
            if len(here.model.table.list()) == 3:
                break
            await asyncio.sleep(0.01)
        assert [record.version for record in here.model.table.list()] == [5, 4, 3]
        assert here.model.table.newest == here.model.table.newest_applicable().version == 5
    async with world(tmp_path) as here:
        assert [record.version for record in here.model.table.list()] == [5, 4, 3]
        assert here.model.table.next_version() == 6
        for version in (3, 4, 5):
            told = here.model.table.get(version).to_info().commit_time
            assert told.ToNanoseconds() == int(dates[version] * 1e9)


@pytest.mark.parametrize("jump", [-HOUR, _DAY])
async def test_no_push_lease_or_bound_ends_early_or_late(
    tmp_path: Path, clocks: Clocks, jump: float
) -> None:
    bounds = DeadlineMonitor()
    async with world(tmp_path, limits={"resume_timeout_s": 1.5}) as here:
        await here.push(simple(1), 1)
        push = await here.pushes.begin(begin(version=2, shard_count=1), 1)
        with await here.model.stager.stage(1, 5), bounds.within("it", 10):
            clocks.wall += jump
            shard = simple(2)[0]
            await here.join(push.push_id, [*shard.layout(), *shard.chunks(100)])
            (told,) = here.pushes.status()
            assert told.version == 2
            assert here.model.table.get(1).slot is not None
            assert list(bounds.overdue()) == []
            assert list(here.pushes.overdue()) == []
        # Idle for as long as it may be, by time that only rises.
        for _ in range(400):
            if not here.pushes.status():
                break
            await asyncio.sleep(0.01)
        told_of = here.pushes.get(pb.GetPushRequest(push_id=push.push_id))
        assert "idle" in told_of.error
