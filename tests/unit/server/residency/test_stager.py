"""Versions read back, leased, proved again; and the engine's checkpoint taken over."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.support.threads import held_threads, memfds
from tests.unit.server.deltas.pushing import until
from tests.unit.server.world import (
    Shard,
    Threads,
    World,
    begin,
    content,
    make_shard,
    one_stream,
    simple,
    world,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.version_events import SlotWanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync.shm.segment_socket import OfferedFile
    from weightsync_server.residency.slot import SlotLease

CODE = grpc.StatusCode


def stored(here: World, version: int, shard: int) -> Path:
    return Path(here.model.store.url.removeprefix("file://")) / f"m/v{version}/{shard}.safetensors"


class Slow(Threads):
    """Reads from the store when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def load(self, *args: object) -> None:
        await self.go.wait()
        await super().load(*args)  # type: ignore[arg-type]


async def third_evicts_first(here: World) -> None:
    for seed in (1, 2, 3):
        await here.push(simple(seed))
    assert here.model.table.get(1).residency == pb.RESIDENCY_ABSENT
    assert here.model.table.get(1).manifest is None


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("at", "word"), [(-1, '"s1.b"'), (20, "header"), (0, "header")])
async def test_damage_in_the_store_is_found_and_never_staged(
    here: World, at: int, word: str
) -> None:
    await third_evicts_first(here)
    flip(stored(here, 1, 1), at)
    with pytest.raises(WeightSyncError) as caught:
        await here.model.stager.stage(1, 5)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert caught.value.code is CODE.DATA_LOSS
    assert word in caught.value.message
    assert "restore" in caught.value.message
    assert here.model.table.get(1).residency == pb.RESIDENCY_ABSENT
    flip(stored(here, 1, 1), at)
    lease = await here.model.stager.stage(1, 5)
    assert here.read(1) == [shard.data for shard in simple(1)]
    lease.release()


async def test_a_file_that_is_gone(here: World) -> None:
    await third_evicts_first(here)
    stored(here, 1, 0).unlink()
    with pytest.raises((WeightSyncError, OSError)):
        await here.model.stager.stage(1, 5)
    assert [slot.state for slot in here.model.slots.status()].count("free") == 1


async def test_damage_in_memory_is_found_and_the_store_is_read(here: World) -> None:
    await here.push(simple(1))
    lease = await here.model.stager.stage(1, 5)
    await here.model.stager.verify(lease)
    view = lease.segments[1].view
    view[len(simple(1)[1].data) - 1] ^= 4
    with pytest.raises(WeightSyncError) as caught:
        await here.model.stager.verify(lease)
    assert caught.value.reason is Reason.DATA_CORRUPT
    assert '"s1.b"' in caught.value.message
    assert here.model.table.get(1).residency == pb.RESIDENCY_ABSENT
    # The damaged slot is not used again before its reader has let go.
    second = await here.model.stager.stage(1, 5)
    assert second.slot is not lease.slot
    await here.model.stager.verify(second)
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.begin(begin(), 0)
    assert caught.value.reason is Reason.NO_SLOT
    lease.release()
    await here.pushes.begin(begin(), 1)


async def test_damage_of_the_only_copy_fails_the_version(tmp_path: Path) -> None:
    async with world(tmp_path, store="memory://") as here:
        await here.push(simple(1))
        lease = await here.model.stager.stage(1, 5)
        lease.segments[0].view[100] ^= 1
        with pytest.raises(WeightSyncError, match="push it again"):
            await here.model.stager.verify(lease)
        lease.release()
        with pytest.raises(WeightSyncError) as caught:
            here.model.table.newest_applicable()
        assert caught.value.reason is Reason.VERSION_UNKNOWN
        assert await here.push(simple(1)) == 2


async def test_many_callers_share_one_read(tmp_path: Path) -> None:
    class Counting(Threads):
        loads = 0

        async def load(self, *args: object) -> None:
            type(self).loads += 1
            await super().load(*args)  # type: ignore[arg-type]

    async with world(tmp_path, fetchers=Counting()) as here:
        await third_evicts_first(here)
        leases = await asyncio.gather(*(here.model.stager.stage(1, 5) for _ in range(4)))
        assert Counting.loads == 2
        assert {lease.staged_id for lease in leases} == {leases[0].staged_id}
        assert leases[0].slot.leases == 4
        for lease in leases:
            with lease:
                pass
        assert leases[0].slot.leases == 0


async def test_a_caller_that_gives_up_leaves_the_read_to_others(tmp_path: Path) -> None:
    fetchers = Slow()
    async with world(tmp_path, fetchers=fetchers) as here:
        await third_evicts_first(here)
        with pytest.raises(WeightSyncError) as caught:
            await here.model.stager.stage(1, 0.05)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert here.model.table.get(1).residency == pb.RESIDENCY_STAGING
        with pytest.raises(WeightSyncError, match="staged for an apply"):
            await here.model.collector.delete(1)
        waiting = asyncio.create_task(here.model.stager.stage(1, 5))
        await asyncio.sleep(0.01)
        fetchers.go.set()
        (await waiting).release()


async def test_who_waits_for_a_read_gets_it_before_a_push_that_waits_for_a_slot(
    tmp_path: Path,
) -> None:
    fetchers = Slow()
    async with world(tmp_path, fetchers=fetchers) as here:
        await third_evicts_first(here)
        other = await here.model.stager.stage(3, 5)
        staging = asyncio.create_task(here.model.stager.stage(1, 5))
        await asyncio.sleep(0.01)
        pushing = asyncio.create_task(here.pushes.begin(begin(), 5))
        await asyncio.sleep(0.01)
        with pytest.raises(WeightSyncError, match="being read"):
            await here.model.collector.delete(1)
        fetchers.go.set()
        lease = await staging
        assert here.read(1) == [shard.data for shard in simple(1)]
        assert not pushing.done()
        lease.release()
        await pushing
        other.release()


async def test_staging_waits_for_a_slot_and_says_so(here: World) -> None:
    await here.push(simple(1))
    await here.push(simple(2))
    first = await here.model.stager.stage(1, 5)
    second = await here.model.stager.stage(2, 5)
    first.release()
    push = await here.pushes.begin(begin(), 1)
    with pytest.raises(WeightSyncError) as caught:
        await here.model.stager.stage(1, 0.2)
    assert caught.value.reason is Reason.NO_SLOT
    assert f"version 3 receiving by push {push.push_id}" in caught.value.message
    assert "`weightsync abort ID`" in caught.value.message
    assert caught.value.metadata == {"slots": "2", "push_ids": push.push_id}
    waiting = await read_of(here, 1)
    await here.pushes.abort(pb.AbortPushRequest(push_id=caught.value.metadata["push_ids"]))
    (await waiting).release()
    second.release()


async def test_who_joins_a_read_that_waits_for_a_slot_waits_as_long_as_it_asked_for(
    here: World,
) -> None:
    await third_evicts_first(here)
    others = [await here.model.stager.stage(version, 5) for version in (2, 3)]
    first = asyncio.create_task(here.model.stager.stage(1, 0.1))
    second = asyncio.create_task(here.model.stager.stage(1, 5))
    with pytest.raises(WeightSyncError, match=r"in 0\.1 s") as caught:
        await first
    assert caught.value.reason is Reason.NO_SLOT
    await asyncio.sleep(0.05)
    assert not second.done(), "the first caller's deadline is not the second's"
    others[0].release()
    (await second).release()
    others[1].release()


async def test_who_comes_when_a_read_gives_up_waits_as_long_as_it_asked_for(here: World) -> None:
    await third_evicts_first(here)
    others = [await here.model.stager.stage(version, 5) for version in (2, 3)]
    loop, begun = asyncio.get_running_loop(), []

    def begin_second() -> None:
        begun.append(loop.create_task(here.model.stager.stage(1, 5)))

    # A busy machine: one comes in the turn of the loop in which the read notices that it is over.
    over = loop.time() + 0.1
    loop.call_at(over - 0.05, time.sleep, 0.2)
    loop.call_at(over, loop.call_soon, begin_second)
    with pytest.raises(WeightSyncError, match="no slot became free"):
        await here.model.stager.stage(1, 0.1)
    others[0].release()
    (await begun[0]).release()
    others[1].release()


async def test_a_read_waits_for_a_slot_no_longer_than_anybody_wanted(here: World) -> None:
    await third_evicts_first(here)
    others = [await here.model.stager.stage(version, 5) for version in (2, 3)]
    with pytest.raises(WeightSyncError) as caught:
        await here.model.stager.stage(1, 0.05)
    assert caught.value.reason is Reason.NO_SLOT
    await asyncio.sleep(0.05)
    others[0].release()
    await asyncio.sleep(0.05)
    assert here.model.table.get(1).residency == pb.RESIDENCY_ABSENT
    others[1].release()


async def test_no_push_is_named_where_none_holds_a_slot(here: World) -> None:
    await here.push(simple(1))
    await here.push(simple(2))
    leases = [await here.model.stager.stage(version, 5) for version in (1, 2)]
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.begin(begin(), 0)
    assert caught.value.metadata == {"slots": "2"}
    assert "abort" not in caught.value.message
    for lease in leases:
        lease.release()


async def read_of(here: World, version: int) -> asyncio.Task[SlotLease]:
    """Begin to stage a version; return when that waits for a slot."""
    waits = asyncio.Event()
    here.model.events.on(SlotWanted, lambda _: waits.set())
    staging = asyncio.create_task(here.model.stager.stage(version, 5))
    await waits.wait()
    return staging


def holders(here: World) -> list[int]:
    """Return the version in each slot."""
    return sorted(slot.version for slot in here.model.slots.status())


async def test_a_version_that_is_pushed_again_while_it_waits_for_a_slot_gets_one(
    here: World,
) -> None:
    await third_evicts_first(here)
    other = await here.model.stager.stage(3, 5)
    opened = await here.pushes.begin(begin(version=1), 5)
    await here.join(opened.push_id, [message for s in simple(1) for message in s.all()])
    staging = await read_of(here, 1)
    response = await here.pushes.commit(pb.CommitPushRequest(push_id=opened.push_id))
    assert response.already
    # Also when another slot comes free.
    other.release()
    lease = await staging
    assert holders(here) == [1, 3]
    assert here.read(1) == [shard.data for shard in simple(1)]
    lease.release()


async def test_a_document_that_nobody_waits_for_any_more_is_not_left(here: World) -> None:
    await here.push(simple(1))
    before = memfds()
    with held_threads() as held:
        staging = asyncio.create_task(here.model.stager.stage(1, 5))
        await held.begun.wait()
        staging.cancel()
        held.go.set()
        await asyncio.wait([staging])
    assert memfds() == before
    assert here.model.table.get(1).place.leases == 0
    (await here.model.stager.stage(1, 5)).release()


# Adoption


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[int] = []

    def of(self, shards: list[Shard]) -> list[OfferedFile]:
        return [self.one(shard.name, shard.data) for shard in shards]

    def one(self, name: str, data: bytes) -> OfferedFile:
        path = self.folder / name
        path.write_bytes(data)
        self.open.append(os.open(path, os.O_RDONLY))
        return name, len(data), self.open[-1]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    for fd in made.open:
        os.close(fd)


async def test_a_checkpoint_that_is_a_known_version(here: World, files: Files) -> None:
    await third_evicts_first(here)
    record = await here.model.adoption.adopt(files.of(simple(1)), 9)
    assert record.version == 1
    # It was read anyway: now it lies in a slot.
    assert record.residency == pb.RESIDENCY_STAGED
    assert here.read(1) == [shard.data for shard in simple(1)]
    lease = await here.model.stager.stage(1, 5)
    await here.model.stager.verify(lease)
    lease.release()
    # The same tensors in other files are the same version.
    tensors = [
        (e.name, e.dtype, e.shape, s.data[8 + s.header_size :][e.begin : e.end])
        for s in simple(2)
        for e in s.entries
    ]
    together = make_shard(0, tensors)
    record = await here.model.adoption.adopt(files.of([together]), 9)
    assert record.version == 2
    assert content([together]) == content(simple(2))


async def test_a_checkpoint_that_is_a_version_which_waits_for_a_slot(
    tmp_path: Path, files: Files
) -> None:
    fetchers = Slow()
    async with world(tmp_path / "world", fetchers=fetchers) as here:
        await third_evicts_first(here)
        other = await here.model.stager.stage(3, 5)
        adopting = asyncio.create_task(here.model.adoption.adopt(files.of(simple(1)), 9))
        await until(lambda: 9 in holders(here))
        staging = await read_of(here, 1)
        fetchers.go.set()
        assert (await adopting).version == 1
        other.release()
        lease = await staging
        assert holders(here) == [1, 3]
        assert here.read(1) == [shard.data for shard in simple(1)]
        lease.release()


async def test_adoption_is_not_bound_to_a_writer(here: World, files: Files) -> None:
    await here.model.epochs.acquire("trainer")
    record = await here.model.adoption.adopt(files.of(simple(1)), 5)
    assert (record.version, record.epoch) == (5, 0)
    assert await here.push(simple(2)) == 6
    push = await here.pushes.begin(begin(), 1)
    assert push.version == 7
    with pytest.raises(WeightSyncError) as caught:
        await here.model.adoption.adopt(files.of(simple(3)), 7)
    assert caught.value.reason is Reason.VERSION_NOT_ABOVE
    assert here.model.table.get(7).durability == pb.DURABILITY_RECEIVING
    assert (await here.model.adoption.adopt(files.of(simple(4)), 0)).version == 8


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.safetensors", b"\x80\x04pickle" * 10, Reason.SHARD_INVALID),
        ("a.safetensors", b"", Reason.SHARD_INVALID),
        ("a.safetensors", simple(1)[0].data[:-1], Reason.SHARD_INVALID),
        ("a.safetensors", simple(1)[0].data + b"x", Reason.LAYOUT_INVALID),
        ("z.safetensors", simple(9)[0].data, Reason.LAYOUT_INVALID),
    ],
    ids=["pickle", "empty", "cut", "trailing", "twice"],
)
async def test_a_checkpoint_that_is_none(
    here: World, files: Files, name: str, data: bytes, reason: Reason
) -> None:
    offered = [*files.of(simple(1)), files.one(name, data)]
    with pytest.raises(WeightSyncError) as caught:
        await here.model.adoption.adopt(offered, 1)
    assert caught.value.reason is reason
    assert_nothing(here)


def assert_nothing(here: World) -> None:
    assert here.model.table.list() == []
    assert [slot.state for slot in here.model.slots.status()] == ["free", "free"]
    store = Path(here.model.store.url.removeprefix("file://"))
    assert not list(store.rglob("*.safetensors"))


async def test_a_number_that_is_taken(here: World, files: Files) -> None:
    await here.push(simple(1))
    with pytest.raises(WeightSyncError) as caught:
        await here.model.adoption.adopt(files.of(simple(2)), 1)
    assert caught.value.reason is Reason.VERSION_NOT_ABOVE
    assert here.read(1) == [shard.data for shard in simple(1)]
    assert here.model.table.list()[0].content_digest == content(simple(1))


async def test_an_adoption_that_cannot_be_stored(tmp_path: Path, files: Files) -> None:
    class Full(Threads):
        async def persist(self, *_: object) -> None:
            raise WeightSyncError(Reason.DISK_EXHAUSTED, "no space")

    async with world(tmp_path, fetchers=Full()) as here:
        with pytest.raises(WeightSyncError, match="no space"):
            await here.model.adoption.adopt(files.of(simple(1)), 0)
        assert_nothing(here)


async def test_no_push_takes_the_number_of_a_checkpoint_that_is_being_adopted(
    tmp_path: Path, files: Files
) -> None:
    fetchers = Threads()
    fetchers.gate = asyncio.Event()
    async with world(tmp_path, fetchers=fetchers) as here:
        adopting = asyncio.create_task(here.model.adoption.adopt(files.of(simple(1)), 1))
        await until(lambda: here.model.table.find(1) is not None)
        with pytest.raises(WeightSyncError, match="the engine's checkpoint") as caught:
            await here.pushes.begin(begin(version=1), 1)
        assert caught.value.reason is Reason.PUSH_ABORTED
        assert caught.value.code is CODE.ABORTED
        assert caught.value.retry_after_s
        assert (await here.pushes.begin(begin(), 1)).version == 2
        fetchers.gate.set()
        await adopting
        assert [stored(here, 1, s.index).read_bytes() for s in simple(1)] == [
            shard.data for shard in simple(1)
        ]
        # Now it is a version like any other: its own content is there already.
        again = await here.pushes.stream(one_stream(simple(1), version=1))
        assert again.commit.already
