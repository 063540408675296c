"""Versions whose bytes are all here and proved while the disk is still busy with them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.world import (
    Shard,
    Threads,
    World,
    begin,
    content,
    simple,
    world,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from weightsync_server.residency.slot import SlotLease


@pytest.fixture
def disk() -> Threads:
    return Threads()


@pytest.fixture
async def here(tmp_path: Path, disk: Threads) -> AsyncIterator[World]:
    async with world(tmp_path, fetchers=disk) as made:
        yield made


async def arrive(here: World, disk: Threads, shards: list[Shard], version: int = 0) -> str:
    """Send a whole version to a disk that does not answer; return the id of the push."""
    disk.gate = asyncio.Event()
    begun = await here.pushes.begin(begin(version=version, shard_count=len(shards)), None)
    messages = [message for shard in shards for message in shard.all()]
    await here.join(begun.push_id, messages)
    await until_staged(here, begun.version)
    return begun.push_id


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


async def until_staged(here: World, version: int) -> None:
    await until(lambda: here.model.table.get(version).residency == pb.RESIDENCY_STAGED)


async def make_live(here: World, version: int) -> SlotLease:
    """Do with a version what an apply does; the lease is what the session holds."""
    lease = await here.model.stager.stage(version, 5, durable=False)
    await here.model.stager.verify(lease)
    here.model.serving.engine("engine").set_live(version)
    return lease


async def failed(here: World, disk: Threads, push: str) -> WeightSyncError:
    """Commit a push on a full disk."""
    assert disk.gate is not None
    disk.full = True
    disk.gate.set()
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    disk.full = False
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    return caught.value


def label(here: World, version: int) -> tuple[int, int, int]:
    info = here.model.table.get(version).to_info()
    return info.durability, info.residency, info.serving


async def gone(here: World, version: int) -> None:
    with pytest.raises(WeightSyncError) as caught:
        await here.model.stager.stage(version, 1, durable=False)
    assert caught.value.reason is Reason.VERSION_UNKNOWN


async def test_all_bytes_proved_is_staged(here: World, disk: Threads) -> None:
    shards = simple(3)
    push = await arrive(here, disk, shards, 1)
    info = here.model.table.get(1).to_info()
    assert label(here, 1) == (pb.DURABILITY_RECEIVING, pb.RESIDENCY_STAGED, pb.SERVING_NO)
    assert info.content_digest == content(shards)
    assert (info.shard_count, info.tensor_count) == (2, 4)
    assert here.read(1) == [shard.data for shard in shards]
    # Nobody may rely on it unless somebody says so.
    assert here.model.table.get(1).content_digest == ""
    assert here.model.table.newest == 0
    with pytest.raises(WeightSyncError, match="no committed version"):
        here.model.table.newest_applicable()
    with pytest.raises(WeightSyncError, match="require_durable") as caught:
        await here.model.stager.stage(1, 5)
    assert caught.value.reason is Reason.PUSH_INCOMPLETE
    with await here.model.stager.stage(1, 5, durable=False) as lease:
        await here.model.stager.verify(lease)
        assert here.model.table.get(1).content_digest == content(shards)
    assert disk.gate is not None
    disk.gate.set()
    await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert label(here, 1) == (pb.DURABILITY_COMMITTED, pb.RESIDENCY_STAGED, pb.SERVING_NO)


async def test_a_commit_tells_that_no_shard_is_missing(here: World, disk: Threads) -> None:
    disk.gate = asyncio.Event()
    begun = await here.pushes.begin(begin(), None)
    await here.join(begun.push_id, [m for shard in simple() for m in shard.all()])
    await asyncio.sleep(0.2)
    # There might be a third shard.
    assert here.model.table.get(1).residency == pb.RESIDENCY_ABSENT
    commit = asyncio.create_task(here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id)))
    await until_staged(here, 1)
    with pytest.raises(WeightSyncError, match="at most 2 shards"):
        await here.join(begun.push_id, simple(shards=3)[2].all())
    disk.gate.set()
    assert (await commit).durable


async def test_the_declared_sum_tells_it_too(here: World, disk: Threads) -> None:
    disk.gate = asyncio.Event()
    shards = simple()
    total = sum(len(shard.data) for shard in shards)
    begun = await here.pushes.begin(begin(total_bytes=total), None)
    await here.join(begun.push_id, shards[0].all())
    await asyncio.sleep(0.1)
    assert here.model.table.get(1).residency == pb.RESIDENCY_ABSENT
    await here.join(begun.push_id, shards[1].all())
    await until_staged(here, 1)
    disk.gate.set()


async def test_a_live_version_becomes_durable(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(), 1)
    lease = await make_live(here, 1)
    assert label(here, 1) == (pb.DURABILITY_RECEIVING, pb.RESIDENCY_STAGED, pb.SERVING_LIVE)
    # A reconciliation need not ask again.
    (await here.model.stager.stage(1, 5)).release()
    assert disk.gate is not None
    disk.gate.set()
    response = await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert response.content_digest == content(simple())
    assert label(here, 1) == (pb.DURABILITY_COMMITTED, pb.RESIDENCY_STAGED, pb.SERVING_LIVE)
    lease.release()
    assert here.read(1) == [shard.data for shard in simple()]


async def test_a_live_version_outlives_its_failed_commit(here: World, disk: Threads) -> None:
    await here.push(simple(1), 1)
    (await make_live(here, 1)).release()
    shards = simple(2)
    push = await arrive(here, disk, shards, 2)
    lease = await make_live(here, 2)
    await failed(here, disk, push)
    assert label(here, 2) == (pb.DURABILITY_FAILED, pb.RESIDENCY_STAGED, pb.SERVING_LIVE)
    assert here.read(2) == [shard.data for shard in shards]
    assert here.model.serving.rollback_to == 1
    # Another version takes the other slot, never this one.
    await here.push(simple(3), 3)
    assert here.read(2) == [shard.data for shard in shards]
    assert here.model.table.newest_applicable().version == 3
    # The way back: the old one becomes live, then the session lets go of this one.
    back = await here.model.stager.stage(1, 5)
    here.model.serving.engine("engine").set_live(1)
    assert label(here, 2)[2] == pb.SERVING_NO
    lease.release()
    await gone(here, 2)
    back.release()
    assert {slot.record.version for slot in here.model.slots.slots if slot.record} == {1}


async def test_the_number_of_what_was_served_is_used_up(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(2), 7)
    lease = await make_live(here, 7)
    await failed(here, disk, push)
    here.model.serving.engine("engine").set_live(0)
    lease.release()
    await gone(here, 7)
    await until(lambda: here.model.table.highest == 7)
    with pytest.raises(WeightSyncError) as caught:
        await here.push(simple(3), 7)
    assert caught.value.reason is Reason.VERSION_NOT_ABOVE


async def test_a_live_version_is_committed_later(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(2), 1)
    lease = await make_live(here, 1)
    await failed(here, disk, push)
    for other in (simple(3), simple(2, shards=1)):
        with pytest.raises(WeightSyncError) as caught:
            await here.push(other, 1)
        assert caught.value.reason is Reason.VERSION_CONFLICT
        assert label(here, 1)[0] == pb.DURABILITY_FAILED
    assert await here.push(simple(2), 1) == 1
    assert label(here, 1) == (pb.DURABILITY_COMMITTED, pb.RESIDENCY_STAGED, pb.SERVING_LIVE)
    here.model.serving.engine("engine").set_live(0)
    lease.release()
    assert here.model.table.get(1).commit == (await here.model.store.open())[0]
    assert len([slot for slot in here.model.slots.slots if slot.free]) == 1


async def test_a_second_full_disk_changes_nothing(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(2), 1)
    lease = await make_live(here, 1)
    await failed(here, disk, push)
    again = await arrive(here, disk, simple(2), 1)
    await failed(here, disk, again)
    assert label(here, 1) == (pb.DURABILITY_FAILED, pb.RESIDENCY_STAGED, pb.SERVING_LIVE)
    assert here.read(1) == [shard.data for shard in simple(2)]
    assert await here.model.store.open() == []
    lease.release()
    assert here.model.table.get(1).serving == pb.SERVING_LIVE


async def test_an_abort_of_what_is_used_is_refused(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(2), 1)
    lease = await here.model.stager.stage(1, 5, durable=False)
    for serving, told in ((0, "staged for an apply"), (1, "apply another version or roll back")):
        here.model.serving.engine("engine").set_live(serving)
        with pytest.raises(WeightSyncError, match=told) as caught:
            await here.pushes.abort(pb.AbortPushRequest(push_id=push))
        assert caught.value.reason is Reason.VERSION_IN_USE
    here.model.serving.engine("engine").set_live(0)
    lease.release()
    await here.pushes.abort(pb.AbortPushRequest(push_id=push))
    await gone(here, 1)


async def test_a_push_that_fails_in_an_apply_stays_so_long(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(2), 1)
    lease = await here.model.stager.stage(1, 5, durable=False)
    await failed(here, disk, push)
    assert here.read(1) == [shard.data for shard in simple(2)]
    with pytest.raises(WeightSyncError) as caught:
        await here.model.stager.verify(lease)
    assert caught.value.reason is Reason.PUSH_ABORTED
    lease.release()
    await gone(here, 1)
    # It was never served: the number may be used.
    assert await here.push(simple(3), 1) == 1


async def test_a_newer_writer_takes_nothing_from_the_engine(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(2), 1)
    await make_live(here, 1)
    await here.model.epochs.acquire("another")
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert caught.value.reason is Reason.EPOCH_STALE
    await until(lambda: label(here, 1)[0] == pb.DURABILITY_FAILED)
    assert here.read(1) == [shard.data for shard in simple(2)]


async def test_damage_in_memory_is_not_committed(here: World, disk: Threads) -> None:
    push = await arrive(here, disk, simple(2), 1)
    lease = await here.model.stager.stage(1, 5, durable=False)
    lease.segments[1].view[len(simple(2)[1].data) - 1] ^= 1
    with pytest.raises(WeightSyncError, match="push it again") as caught:
        await here.model.stager.verify(lease)
    assert caught.value.reason is Reason.DATA_CORRUPT
    lease.release()
    assert disk.gate is not None
    disk.gate.set()
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert caught.value.reason is Reason.DATA_CORRUPT
    await gone(here, 1)
    assert await here.push(simple(2), 1) == 1


async def test_a_late_digest_of_the_trainer_counts(here: World, disk: Threads) -> None:
    disk.gate = asyncio.Event()
    shards = simple()
    begun = await here.pushes.begin(begin(shard_count=2), None)
    await here.join(begun.push_id, [m for s in shards for m in (*s.layout(), *s.chunks())])
    await until_staged(here, 1)
    await make_live(here, 1)
    shards[0].digests[0] = bytes(16)
    with pytest.raises(WeightSyncError) as caught:
        await here.join(begun.push_id, shards[0].given())
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert label(here, 1) == (pb.DURABILITY_FAILED, pb.RESIDENCY_STAGED, pb.SERVING_LIVE)


async def test_what_comes_too_late_to_fail_a_commit_does_not_undo_it(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = simple(4)
    begun = await here.pushes.begin(begin(shard_count=len(shards)), None)
    await here.join(begun.push_id, [message for shard in shards for message in shard.all()])
    push, commit = here.pushes.find(begun.push_id), here.model.commits.commit

    async def then_failed(*args: Any, **named: Any) -> Any:
        done = await commit(*args, **named)
        push.lifecycle.fail(
            WeightSyncError(Reason.DIGEST_MISMATCH, "another stream told other digests")
        )
        return done

    monkeypatch.setattr(here.model.commits, "commit", then_failed)
    answer = await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
    await push.lifecycle.closed()
    assert label(here, answer.version)[:2] == (pb.DURABILITY_COMMITTED, pb.RESIDENCY_STAGED)
    assert here.read(answer.version) == [shard.data for shard in shards]
    again = await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
    assert (again.version, again.already) == (answer.version, True)
