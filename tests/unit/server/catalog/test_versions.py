"""Numbers, epochs, marks, retention, history and watching."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.unit.server.world import World, begin, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.catalog.version_events import SlotWanted, VersionChanged
from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from collections.abc import Coroutine

CODE = grpc.StatusCode


def numbers(here: World) -> list[int]:
    return [record.version for record in here.model.table.list()]


def folders(here: World) -> list[str]:
    store = Path(here.model.store.url.removeprefix("file://"))
    return sorted(path.name for path in store.glob("m/v*"))


async def pushed(here: World, count: int) -> None:
    for seed in range(count):
        await here.push(simple(seed))


async def settled(here: World) -> None:
    await here.model.collector.close()


async def test_unknown_versions(here: World) -> None:
    with pytest.raises(WeightSyncError, match="push one") as caught:
        here.model.table.get(1)
    assert caught.value.code is CODE.NOT_FOUND
    with pytest.raises(WeightSyncError) as caught:
        here.model.table.newest_applicable()
    assert caught.value.reason is Reason.VERSION_UNKNOWN
    await pushed(here, 2)
    with pytest.raises(WeightSyncError, match="newest is 2"):
        here.model.table.get(9)
    with pytest.raises(WeightSyncError, match="version 9"):
        await here.model.stager.stage(9, 1)


def held(monkeypatch: pytest.MonkeyPatch, here: World, name: str) -> asyncio.Event:
    """Let a method of the store begin when the event is set."""
    go, method = asyncio.Event(), getattr(here.model.store, name)

    async def waits(*args: Any) -> Any:
        await go.wait()
        return await method(*args)

    monkeypatch.setattr(here.model.store, name, waits)
    return go


async def left(work: Coroutine[Any, Any, Any], go: asyncio.Event) -> None:
    """Begin, let the caller leave in its midst, and wait until that is told."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_epoch_whose_caller_left_counts(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await left(here.model.epochs.acquire("w"), held(monkeypatch, here, "write_epoch"))
    assert here.model.epochs.check(0) == 1 == await here.model.store.read_epoch("m")
    await pushed(here, 1)


@pytest.mark.parametrize("name", ["write_marks", "delete"])
async def test_a_version_whose_deleter_left_is_gone(
    here: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await pushed(here, 2)
    await left(here.model.collector.delete(1), held(monkeypatch, here, name))
    assert (numbers(here), folders(here)) == ([2], ["v2"])


async def test_epochs_are_persisted_and_only_rise(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert here.model.epochs.check(0) == 0
        assert await asyncio.gather(*(here.model.epochs.acquire("w") for _ in range(3))) == [
            1,
            2,
            3,
        ]
        with pytest.raises(WeightSyncError) as caught:
            await here.model.epochs.acquire("w" * 257)
        assert caught.value.reason is Reason.REQUEST_INVALID
    async with world(tmp_path) as here:
        assert here.model.epochs.newest == 3
        assert here.model.epochs.check(0) == 3
        for epoch in (2, 4):
            with pytest.raises(WeightSyncError) as caught:
                here.model.epochs.check(epoch)
            assert caught.value.reason is Reason.EPOCH_STALE
            assert caught.value.metadata == {"epoch": "3"}


async def test_newest_skips_rejected_content_whatever_its_number(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for seed in (1, 2, 2):
            await here.push(simple(seed))
        await here.model.serving.reject(3, "wrong outputs")
        assert here.model.table.newest_applicable().version == 1
        await here.push(simple(2))
        assert here.model.table.newest_applicable().version == 1
        await here.model.serving.reject(4, "wrong outputs again")
    async with world(tmp_path) as here:
        assert here.model.table.newest_applicable().version == 1
        # Whoever accepts it accepts the content.
        await here.model.serving.accept(3)
        assert here.model.table.get(4).rejected_reason == ""
        assert here.model.table.newest_applicable().version == 4


async def test_pins_rejections_and_used_numbers_survive(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await pushed(here, 4)
        await here.model.serving.pin(1, pinned=True)
        await here.model.serving.reject(4, "wrong outputs")
        assert here.model.table.newest_applicable().version == 3
        await here.model.collector.delete(3)
        await here.model.serving.reject(2, "")
    async with world(tmp_path) as here:
        assert numbers(here) == [4, 2, 1]
        assert here.model.table.get(1).pinned
        info = here.model.table.get(4).to_info()
        assert info.serving == pb.SERVING_REJECTED
        assert info.rejected_reason == "wrong outputs"
        assert here.model.table.newest_applicable().version == 1
        await here.model.serving.accept(4)
        assert here.model.table.get(4).to_info().serving == pb.SERVING_NO
        await here.model.collector.delete(4)
        await here.model.serving.pin(1, pinned=False)
        assert not here.model.table.get(1).pinned
    async with world(tmp_path) as here:
        assert numbers(here) == [2, 1]
        assert here.model.table.highest == 4
        assert await here.push(simple(9)) == 5


async def test_what_is_in_use_cannot_be_deleted(here: World) -> None:
    await pushed(here, 2)
    here.model.serving.engine("engine").set_live(2)
    await here.model.serving.pin(1, pinned=True)
    lease = await here.model.stager.stage(1, 5)

    async def refused(version: int, word: str) -> None:
        with pytest.raises(WeightSyncError, match=word) as caught:
            await here.model.collector.delete(version)
        assert caught.value.reason is Reason.VERSION_IN_USE
        assert caught.value.code is CODE.FAILED_PRECONDITION

    await refused(2, "live")
    await refused(1, "pinned")
    await here.model.serving.pin(1, pinned=False)
    await refused(1, "staged for an apply")
    lease.release()
    lease.release()
    assert folders(here) == ["v1", "v2"]
    await here.model.collector.delete(1)
    assert folders(here) == ["v2"]
    assert [slot.state for slot in here.model.slots.status()] == ["free", "live"]
    push = await here.pushes.begin(begin(), 1)
    await refused(push.version, "abort the push")


async def test_retention_by_count(tmp_path: Path) -> None:
    async with world(tmp_path, retention=Retention(3), slots=3) as here:
        await pushed(here, 2)
        here.model.serving.engine("engine").set_live(1)
        here.model.serving.engine("engine").set_live(2)
        await here.push(simple(3))
        await here.model.serving.pin(3, pinned=True)
        for seed in (4, 5, 6, 7):
            await here.push(simple(seed))
            await settled(here)
        # Live 2, its way back 1, pinned 3 and the newest stay.
        assert numbers(here) == [7, 3, 2, 1]
        assert folders(here) == ["v1", "v2", "v3", "v7"]
        await here.model.serving.pin(3, pinned=False)
        await here.push(simple(8))
        await settled(here)
        # 7 lies in a slot still.
        assert numbers(here) == [8, 7, 2, 1]


async def test_retention_by_bytes(tmp_path: Path) -> None:
    size = sum(len(shard.data) for shard in simple())
    async with world(tmp_path, retention=Retention(100, 4 * size)) as here:
        await pushed(here, 7)
        await settled(here)
        assert numbers(here) == [7, 6, 5, 4]


async def test_history(here: World) -> None:
    await pushed(here, 3)
    serving, engine = here.model.serving, here.model.serving.engine("engine")

    async def ways_back() -> list[int]:
        """Return where a rollback goes, each way back being rejected in turn until none is left."""
        found = [engine.rollback_to]
        while found[-1]:
            await serving.reject(found[-1], "bad")
            found.append(engine.rollback_to)
        for version in found[:-1]:
            await serving.accept(version)
        return found

    for version in (1, 2, 3):
        engine.set_live(version)
    assert await ways_back() == [2, 1, 0]
    engine.set_live(2)
    assert await ways_back() == [1, 0]
    engine.set_live(0)
    assert await ways_back() == [2, 1, 0]


async def test_live_rollback_and_back_again(here: World) -> None:
    await pushed(here, 3)
    for version in (1, 2, 3):
        here.model.serving.engine("engine").set_live(version)
    assert (here.model.serving.live, here.model.serving.rollback_to) == (3, 2)
    here.model.serving.engine("engine").set_live(2)
    await here.model.serving.reject(3, "bad")
    assert (here.model.serving.live, here.model.serving.rollback_to) == (2, 1)
    serving = [record.serving for record in here.model.table.list()]
    assert serving == [pb.SERVING_REJECTED, pb.SERVING_LIVE, pb.SERVING_NO]
    here.model.serving.engine("engine").set_live(0)
    assert here.model.serving.rollback_to == 2
    here.model.serving.engine("engine").restore_history(1, 3, 99)
    here.model.serving.engine("engine").set_live(3)
    assert here.model.serving.rollback_to == 1


async def test_a_watcher_sees_the_present_then_changes(here: World) -> None:
    await pushed(here, 2)
    watch = here.model.feed.watch()
    seen = [await anext(watch) for _ in range(2)]
    assert [(c.info.version, c.initial) for c in seen] == [(1, True), (2, True)]
    await here.model.serving.reject(1, "x")
    change = await anext(watch)
    assert change.info.serving == pb.SERVING_REJECTED
    assert change.revision > seen[-1].revision
    await here.model.collector.delete(1)
    change = await anext(watch)
    assert change.deleted
    await here.push(simple(5))
    states: list[tuple[int, int]] = []
    while not states or states[-1][0] != pb.DURABILITY_COMMITTED:
        info = (await anext(watch)).info
        states.append((info.durability, info.residency))
    assert states == [
        (pb.DURABILITY_RECEIVING, pb.RESIDENCY_ABSENT),
        (pb.DURABILITY_RECEIVING, pb.RESIDENCY_STAGED),
        (pb.DURABILITY_COMMITTED, pb.RESIDENCY_STAGED),
    ]
    here.model.feed.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


@pytest.mark.parametrize("name", ["pin", "reject"])
async def test_nobody_is_told_again_of_a_version_that_went_while_it_was_marked(
    here: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await pushed(here, 2)
    watch = here.model.feed.watch()
    for _ in range(2):
        await anext(watch)
    go = held(monkeypatch, here, "write_marks")
    mark = (
        here.model.serving.pin(1, pinned=True)
        if name == "pin"
        else here.model.serving.reject(1, "bad")
    )
    # In this order: the mark is written first, and told when the version is gone already.
    marking, deleting = (
        asyncio.create_task(mark),
        asyncio.create_task(here.model.collector.delete(1)),
    )
    change = await anext(watch)
    assert (change.info.version, change.deleted) == (1, True)
    go.set()
    await asyncio.gather(marking, deleting)
    here.model.feed.close()
    assert [change async for change in watch] == []
    assert await here.model.store.read_marks("m") == {"pinned": [], "rejected": {}, "highest": 1}


async def test_nobody_is_told_again_of_a_version_that_went_before_it_got_a_slot(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, slots=1) as here:
        await pushed(here, 2)
        lease, waits = await here.model.stager.stage(2, 5), asyncio.Event()
        here.model.events.on(SlotWanted, lambda _: waits.set())
        # Its read goes on when the one who asked for it has left.
        staging = asyncio.create_task(here.model.stager.stage(1, 30))
        await waits.wait()
        staging.cancel()
        await asyncio.wait([staging])
        reading = here.model.stager._loading[1]
        await here.model.collector.delete(1)
        watch = here.model.feed.watch()
        assert (await anext(watch)).info.version == 2
        lease.release()
        await asyncio.wait([reading])
        here.model.feed.close()
        assert {change.info.version async for change in watch} <= {2}


async def test_a_watcher_that_is_too_slow_is_told(here: World) -> None:
    await here.push(simple())
    watch: Any = here.model.feed.watch()
    await anext(watch)
    for _ in range(1025):
        here.model.table.touch(here.model.table.get(1))
    for _ in range(1024):
        await anext(watch)
    with pytest.raises(WeightSyncError) as caught:
        await anext(watch)
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    assert not here.model.feed._queues


async def test_a_deletion_that_the_store_refuses_changes_nothing(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pushed(here, 3)
    await here.model.serving.reject(3, "wrong outputs")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for step in ("write", "fsync", "rename", "unlink"):
        with monkeypatch.context() as patch:
            patch.setattr(durable_files, step, refuse)
            with pytest.raises(WeightSyncError) as caught:
                await here.model.collector.delete(3)
        assert caught.value.reason is Reason.FAULT
        assert numbers(here) == [3, 2, 1]
        assert here.model.table.get(3).to_info().rejected_reason == "wrong outputs"
        with await here.model.stager.stage(3, 5, for_engine=False):
            assert here.read(3) == [shard.data for shard in simple(2)]
    await here.model.collector.delete(3)
    assert numbers(here) == [2, 1]


async def test_nobody_gets_the_number_of_a_version_while_it_is_deleted(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pushed(here, 2)
    go = threading.Event()
    real = durable_files.fsync

    def wait(fd: int) -> None:
        assert go.wait(10)
        real(fd)

    monkeypatch.setattr(durable_files, "fsync", wait)
    deleting = asyncio.create_task(here.model.collector.delete(2))
    await asyncio.sleep(0)
    assert numbers(here) == [1]
    try:
        with pytest.raises(WeightSyncError) as caught:
            await here.pushes.begin(begin(version=2), 5)
        assert caught.value.reason is Reason.VERSION_NOT_ABOVE
        assert here.model.table.next_version() == 3
    finally:
        go.set()
    await deleting


async def test_that_the_engines_which_are_left_serve_one_version_is_heard_of(here: World) -> None:
    model = here.model
    await pushed(here, 2)
    model.serving.engine("e1").set_live(2)
    model.serving.engine("e2").set_live(1)
    heard: list[int] = []
    model.events.on(VersionChanged, lambda _: heard.append(model.serving.live))
    model.serving.forget("e2")
    assert heard[-1] == model.serving.live == 2
    model.serving.engine("e3").set_live(2)
    heard.clear()
    model.serving.forget("e3")
    assert heard == [2]
