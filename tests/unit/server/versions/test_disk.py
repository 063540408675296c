"""Room in the store is promised once, to whoever comes first, and given back at the end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest

from tests.unit.server.versions.world import World, begin, make_shard, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.store import LocalStore, Store
from weightsync_server.versions.disk import DiskBudget

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Disk:
    free: int

    def free_bytes(self) -> int:
        return self.free


def budget(free: int, floor: int = 0) -> DiskBudget:
    return DiskBudget(cast("Store", Disk(free)), floor)


async def test_what_is_promised_is_promised_once() -> None:
    disk = budget(free=1000, floor=100)
    shares = [disk.share() for _ in range(10)]
    answers = await asyncio.gather(
        *(share.promise(400) for share in shares), return_exceptions=True
    )
    refusals = [answer for answer in answers if isinstance(answer, WeightSyncError)]
    assert len(refusals) == 8
    assert refusals[0].reason is Reason.DISK_EXHAUSTED
    assert refusals[0].metadata == {
        "needed_bytes": "400",
        "free_bytes": "1000",
        "promised_bytes": "800",
        "floor_bytes": "100",
    }
    for share in shares:
        share.close()
    assert disk.promised == 0


async def test_what_is_written_counts_no_longer() -> None:
    disk = budget(free=1000)
    share = disk.share()
    await share.promise(300)
    await share.promise(200)
    assert share.covers(300)
    assert not share.covers(301)
    await share.promise(700)
    assert disk.promised == 700
    share.wrote(300)
    assert disk.promised == 400
    share.wrote(300)
    share.wrote(300)
    assert disk.promised == 0
    share.close()
    share.close()
    assert disk.promised == 0


async def refused(here: World, total: int) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.begin(begin(total_bytes=total), 1)
    return caught.value


async def test_a_push_is_promised_its_declared_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 100_000)
    async with world(tmp_path, slots=3) as here:
        disk = here.versions.disk
        shards = simple()
        total = sum(len(shard.data) for shard in shards)
        first = await here.pushes.begin(begin(total_bytes=100_000 - total), 1)
        assert disk.promised == 100_000 - total
        error = await refused(here, total + 1)
        assert error.reason is Reason.DISK_EXHAUSTED
        assert str(total) in error.message
        # It fits to the byte; what it has written is promised no longer.
        await here.push(shards, total_bytes=total)
        assert disk.promised == 100_000 - total
        await here.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
        assert disk.promised == 0


async def test_an_undeclared_push_is_promised_each_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 10_000)
    async with world(tmp_path) as here:
        shards = [make_shard(i, [(f"t{i}", "U8", (6000,), bytes(6000))]) for i in range(2)]
        with pytest.raises(WeightSyncError) as caught:
            await here.push(shards)
        assert caught.value.reason is Reason.DISK_EXHAUSTED
        assert here.versions.disk.promised == 0
        assert await here.push(shards[:1])
        # A repetition of what is committed needs no room.
        monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 0)
        assert await here.push(shards[:1], version=1) == 1
        assert (await refused(here, 1)).reason is Reason.DISK_EXHAUSTED
