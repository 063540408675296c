"""Room in the store is promised once, to whoever comes first, and given back at the end."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.support.deltas import delta_begin, delta_of
from tests.unit.server.deltas.pushing import send, sparse_history
from tests.unit.server.world import World, begin, content, make_shard, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.deltas import ChainSettings
from weightsync_server.store.disk_quota import DiskQuota
from weightsync_server.store.local.local_store import LocalStore
from weightsync_server.store.protocol import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path


@dataclass
class Disk:
    free: int
    told: Callable[[], object] = lambda: None

    def free_bytes(self) -> int:
        free = self.free
        self.told()
        return free

    def asks(self) -> asyncio.Queue[None]:
        """Return what gets an item whenever it was asked for its free bytes, from any thread."""
        asked: asyncio.Queue[None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.told = lambda: loop.call_soon_threadsafe(asked.put_nowait, None)
        return asked


def budget(free: int, floor: int = 0, wait_s: float = 3600.0) -> DiskQuota:
    return DiskQuota(cast("Store", Disk(free)), floor, wait_s=wait_s)


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
        disk = here.model.disk
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
        assert here.model.disk.promised == 0
        assert await here.push(shards[:1])
        # A repetition of what is committed needs no room.
        monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 0)
        assert await here.push(shards[:1], version=1) == 1
        assert (await refused(here, 1)).reason is Reason.DISK_EXHAUSTED


async def test_room_that_is_being_freed_is_waited_for() -> None:
    disk = Disk(1000)
    room, asked = DiskQuota(cast("Store", disk), wait_s=3600), disk.asks()
    deletions = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for deletion in deletions:
        room.frees(deletion)
    waiting = asyncio.create_task(room.share().promise(1500))
    await asked.get()
    # One that gives too little back was not the last.
    deletions[0].set_result(None)
    await asked.get()
    disk.free = 2000
    deletions[1].set_result(None)
    await waiting
    assert room.promised == 1500
    # None is under way any more: refused at once.
    with pytest.raises(WeightSyncError) as caught:
        await room.share().promise(700)
    assert caught.value.reason is Reason.DISK_EXHAUSTED


async def test_the_wait_for_room_is_bounded() -> None:
    disk = budget(free=1000, wait_s=0.01)
    disk.frees(asyncio.get_running_loop().create_future())
    with pytest.raises(WeightSyncError) as caught:
        await disk.share().promise(1001)
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    assert disk.promised == 0


async def test_who_failed_waits_for_no_room() -> None:
    disk = budget(free=1000)
    share, deletion = disk.share(), asyncio.get_running_loop().create_future()
    disk.frees(deletion)
    waiting = asyncio.create_task(share.promise(1001))
    gone = WeightSyncError(Reason.PUSH_ABORTED, "it was aborted")
    share.end(gone, waiting)
    for promise in (waiting, share.promise(2000), share.sibling().promise(1)):
        with pytest.raises(WeightSyncError) as caught:
            await promise
        assert caught.value is gone
    assert disk.promised == 0


class SmallDisk(Disk):
    """The disk of the store; files that are removed stay on it until `go` is set.

    Attributes:
        go: See above.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(100_000)
        self.go, self._remove = threading.Event(), shutil.rmtree
        patch.setattr(LocalStore, "free_bytes", lambda _: self.free_bytes())
        patch.setattr(shutil, "rmtree", self._rmtree)

    def _rmtree(self, path: Path) -> None:
        assert self.go.wait(30)
        size = sum(file.stat().st_size for file in path.iterdir())
        self._remove(path)
        self.free += size

    async def short(self, free: int, pushing: Coroutine[Any, Any, int]) -> int:
        """Push with so little room; what is being removed goes once room was asked for."""
        self.free, asked = free, self.asks()
        task = asyncio.create_task(pushing)
        await asked.get()
        self.go.set()
        return await task


async def test_a_new_writer_gets_the_room_of_the_old_one(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, total = SmallDisk(monkeypatch), sum(len(shard.data) for shard in simple())
    await here.model.epochs.acquire("old")
    await here.pushes.begin(begin(total_bytes=total), 1)
    await here.model.epochs.acquire("new")
    # Another version than the old writer's.
    assert await disk.short(total, here.push(simple(), total_bytes=total, version=9)) == 9
    assert here.model.disk.promised == 0


async def test_a_push_gets_the_room_of_what_the_last_one_made_superfluous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(len(shard.data) for shard in simple())
    async with world(tmp_path, slots=1, retention=Retention(versions=1)) as here:
        disk = SmallDisk(monkeypatch)
        for version in (1, 2):
            await here.push(simple(), version=version)
        assert await disk.short(0, here.push(simple(), total_bytes=total, version=3)) == 3


async def test_a_shard_gets_the_room_of_a_version_that_is_being_deleted(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch)
    await here.push(simple())
    opened = await here.pushes.begin(begin(), 1)
    deleting = asyncio.create_task(here.model.collector.delete(1))

    async def rest() -> int:
        await here.join(opened.push_id, [message for s in simple() for message in s.all()])
        await here.pushes.commit(pb.CommitPushRequest(push_id=opened.push_id))
        return opened.version

    assert await disk.short(0, rest()) == 2
    await deleting


async def test_an_abort_does_not_wait_for_room(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch)
    disk.go.set()
    opened = await here.pushes.begin(begin(), 1)
    here.model.disk.wait_s = 3600
    here.model.disk.frees(asyncio.get_running_loop().create_future())
    disk.free, asked = 0, disk.asks()
    sending = asyncio.create_task(here.join(opened.push_id, simple()[0].all()))
    await asked.get()
    await here.pushes.abort(pb.AbortPushRequest(push_id=opened.push_id))
    with pytest.raises(WeightSyncError) as caught:
        await sending
    assert caught.value.reason is Reason.PUSH_ABORTED
    assert here.model.disk.promised == 0


async def test_a_commit_that_needs_more_room_does_not_wait_for_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = sparse_history(1)
    # A delta of a version must be kept in full.
    async with world(tmp_path, chains=ChainSettings(length=0)) as here:
        await here.push(old)
        sent = await send(here, delta_of(old, new), commit=None, **delta_begin(old))
        disk, deletion = SmallDisk(monkeypatch), asyncio.get_running_loop().create_future()
        disk.go.set()
        here.model.disk.wait_s = 3600
        here.model.disk.frees(deletion)
        asked = disk.asks()
        request = pb.CommitPushRequest(push_id=sent.push_id, content_digest=content(new))
        committing = asyncio.create_task(here.pushes.commit(request))
        await asked.get()
        await here.model.epochs.acquire("new")
        # It gave too little back, and nothing else is freed but what the push itself has.
        deletion.set_result(None)
        with pytest.raises(WeightSyncError) as caught:
            await committing
        assert caught.value.reason is Reason.EPOCH_STALE
        assert here.model.disk.promised == 0
