"""Who gets a slot, what memory is reserved, and when it is given back."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.open_files import open_files, opened_since
from tests.unit.server.world import (
    MODEL,
    Shard,
    Threads,
    World,
    begin,
    make_shard,
    sending,
    simple,
    world,
)
from weightsync import process_limits
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.version_events import SlotWanted
from weightsync_server.residency import segment_allocator
from weightsync_server.residency.segment_allocator import MAKERS, SegmentBudget


def held(here: World) -> list[tuple[int, str]]:
    return [(slot.version, slot.state) for slot in here.model.slots.status()]


def waits(here: World) -> asyncio.Queue[None]:
    """Return what gets an item whenever somebody begins to wait for a slot."""
    told: asyncio.Queue[None] = asyncio.Queue()
    here.model.events.on(SlotWanted, lambda _: told.put_nowait(None))
    return told


def sized(seed: int, size: int) -> list[Shard]:
    return [make_shard(0, [("t", "U8", (size,), bytes([seed]) * size)])]


async def test_the_order_of_eviction(tmp_path: Path) -> None:
    async with world(tmp_path, slots=3) as here:
        for seed in (1, 2, 3):
            await here.push(simple(seed))
        here.model.serving.engine("engine").set_live(1)
        here.model.serving.engine("engine").set_live(2)
        # 3 is the newest, 2 is live, 1 is the way back: it goes before the newest.
        await here.push(simple(4))
        assert held(here) == [(4, "staged"), (2, "live"), (3, "staged")]
        # 3 is superseded now.
        await here.push(simple(5))
        assert held(here) == [(4, "staged"), (2, "live"), (5, "staged")]
        await here.model.serving.pin(4, pinned=True)
        lease = await here.model.stager.stage(5, 5)
        with pytest.raises(WeightSyncError) as caught:
            await here.pushes.begin(begin(), 0.1)
        assert caught.value.reason is Reason.NO_SLOT
        for word in ("version 4 staged pinned", "version 2 live", "version 5 staged leased"):
            assert word in caught.value.message
        waiting = asyncio.create_task(here.pushes.begin(begin(), 10))
        await asyncio.sleep(0.01)
        lease.release()
        assert (await waiting).version == 6
        waiting = asyncio.create_task(here.pushes.begin(begin(), 10))
        await asyncio.sleep(0.01)
        await here.model.serving.pin(4, pinned=False)
        assert (await waiting).version == 7
        assert held(here) == [(7, "receiving"), (2, "live"), (6, "receiving")]


async def test_a_rejected_version_goes_first(tmp_path: Path) -> None:
    async with world(tmp_path, slots=2) as here:
        await here.push(simple(1))
        await here.push(simple(2))
        await here.model.serving.reject(2, "bad")
        await here.push(simple(3))
        assert held(here)[0][0] in (1, 3)


async def test_waiting_is_first_come_first_served(here: World) -> None:
    opened = [await here.pushes.begin(begin(), 1) for _ in range(2)]
    order: list[str] = []

    async def wait(name: str) -> pb.BeginPushResponse:
        response = await here.pushes.begin(begin(), 10)
        order.append(name)
        return response

    first = asyncio.create_task(wait("first"))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(wait("second"))
    await asyncio.sleep(0.01)
    for push in opened:
        await here.pushes.abort(pb.AbortPushRequest(push_id=push.push_id))
    await asyncio.gather(first, second)
    assert order == ["first", "second"]


async def test_a_slot_given_to_somebody_who_just_gave_up_comes_back(here: World) -> None:
    for seed in range(2):
        await here.push(simple(seed))
    leases = [await here.model.stager.stage(version, 5) for version in (1, 2)]
    pool = here.model.slots
    taking = asyncio.create_task(pool.take(VersionRecord(MODEL, 9), 10))
    await asyncio.sleep(0.01)
    leases[0].release()
    taking.cancel()
    await asyncio.wait([taking])
    assert sum(state == "free" for _, state in held(here)) == 1
    assert not pool._waiting


async def test_who_lost_its_slot_frees_nobody_elses(tmp_path: Path) -> None:
    async with world(tmp_path, slots=1) as here:
        await here.push(simple(1))
        lease, pool, waiting = await here.model.stager.stage(1, 5), here.model.slots, waits(here)
        former, holder = VersionRecord(MODEL, 8), VersionRecord(MODEL, 9)
        takes = [asyncio.create_task(pool.take(record, 10)) for record in (former, holder)]
        for _ in takes:
            await waiting.get()
        lease.release()
        # It has the slot, loses it, and gives up in one moment, before it hears of any of that.
        pool.release(former)
        takes[0].cancel()
        await asyncio.wait(takes)
        assert takes[1].result().record is holder
        assert held(here) == [(9, "receiving")]
        # Late, or twice.
        pool.release(former)
        assert held(here) == [(9, "receiving")]
        pool.release(holder)
        assert held(here) == [(0, "free")]


async def test_a_push_that_ends_as_it_gets_its_slot_frees_nobody_elses(tmp_path: Path) -> None:
    async with world(tmp_path, slots=1) as here:
        await here.push(simple(1))
        lease, waiting = await here.model.stager.stage(1, 5), waits(here)
        first = asyncio.create_task(here.pushes.begin(begin(version=1), 10))
        await waiting.get()
        second = asyncio.create_task(here.pushes.begin(begin(version=2), 10))
        await waiting.get()
        # The first is given the slot, loses it at once, and hears of both when it is the second's.
        lease.release()
        assert held(here) == [(1, "receiving")]
        await here.pushes.abort(pb.AbortPushRequest(push_id=here.pushes.status()[0].push_id))
        with pytest.raises(WeightSyncError) as caught:
            await first
        assert caught.value.reason is Reason.PUSH_ABORTED
        opened = await second
        assert held(here) == [(2, "receiving")]
        await here.join(opened.push_id, [message for s in simple(2) for message in s.all()])
        await here.pushes.commit(pb.CommitPushRequest(push_id=opened.push_id))
        assert here.read(2) == [shard.data for shard in simple(2)]


async def test_exposed_segments_count_until_the_engine_lets_go(here: World) -> None:
    before = here.budget.reserved
    here.model.segments.engines.add("engine")
    await here.push(sized(1, 3 << 20))
    lease = await here.model.stager.stage(1, 5)
    ids = [lease.staged_id, *(segment.id for segment in lease.segments)]
    assert here.model.segments.exposed_to("engine") == set(ids)
    await here.push(sized(2, 3 << 20))
    held_now = here.budget.reserved
    lease.release()
    # Version 3 needs other sizes: the segment of version 1 is retired, but an engine maps it.
    await here.push(sized(3, 9 << 20))
    assert here.model.segments.retired == {ids[1]}
    assert here.budget.reserved > held_now + (9 << 20)
    with SegmentClient(here.server.path) as client, pytest.raises(LookupError):
        client.map([ids[1]])
    here.model.segments.release(ids, "engine")
    assert here.model.segments.retired == frozenset()
    assert here.model.segments.exposed_to("engine") == frozenset()
    # 3 MiB and its header round up to 4, 9 to 10.
    await here.model.segments.unmapped()
    assert here.budget.reserved - before == (4 << 20) + (10 << 20)
    assert isinstance(here.fetchers, Threads)
    assert ids[1] in here.fetchers.forgotten


async def test_memory_that_two_engines_map_counts_until_both_let_go(here: World) -> None:
    segments = here.model.segments
    segments.engines |= {"a", "b"}
    await here.push(sized(1, 3 << 20))
    lease = await here.model.stager.stage(1, 5)
    ids = [segment.id for segment in lease.segments]
    await here.push(sized(2, 3 << 20))
    lease.release()
    await here.push(sized(3, 9 << 20))
    reserved = here.budget.reserved
    segments.release(ids, "a")
    assert segments.retired == set(ids), "b may still read it"
    assert here.budget.reserved == reserved
    segments.release(ids, "a")
    assert segments.retired == set(ids)
    segments.forget_engine("b")
    assert segments.retired == frozenset()
    assert here.budget.reserved < reserved


async def test_a_reader_that_is_no_engine_exposes_nothing(here: World) -> None:
    here.model.segments.engines.add("engine")
    await here.push(simple())
    lease = await here.model.stager.stage(1, 5, for_engine=False)
    assert here.model.segments.exposed_to("engine") == frozenset()
    lease.release()


async def test_all_memory_and_descriptors_come_back(tmp_path: Path) -> None:
    before = open_files()
    async with world(tmp_path) as here:
        here.model.segments.engines.add("engine")
        for seed in range(4):
            await here.push(simple(seed))
            lease = await here.model.stager.stage(seed + 1, 5)
            lease.release()
        budget = here.budget
        ids = here.model.segments.exposed_to("engine")
        assert budget.reserved > 0
    here.model.segments.release(ids, "engine")
    await asyncio.sleep(0)
    assert budget.reserved == 0
    assert budget._untouched == 0
    assert opened_since(before) == []


async def test_the_memory_of_idle_slots_is_given_up_for_a_push(tmp_path: Path) -> None:
    async with world(tmp_path, memory=16 << 20) as here:
        await here.push(sized(1, 5 << 20))
        await here.push(sized(2, 5 << 20))
        await here.model.collector.delete(1)
        # 12 MiB are reserved, 6 of them by the slot that is free and whose segment is too small.
        await here.push(sized(3, 7 << 20))
        assert here.budget.reserved <= 16 << 20
        with pytest.raises(WeightSyncError) as caught:
            await here.push(sized(4, 15 << 20))
        # A promise makes room as well.
        more = await here.pushes.begin(begin(total_bytes=7 << 20), 1)
        await here.pushes.abort(pb.AbortPushRequest(push_id=more.push_id))
        assert caught.value.reason is Reason.MEMORY_EXHAUSTED
        assert str(16 << 20) in caught.value.message
        assert here.read(3) == [sized(3, 7 << 20)[0].data]


async def test_a_promise_is_kept_and_given_back(tmp_path: Path) -> None:
    async with world(tmp_path, memory=32 << 20) as here:
        first = await here.pushes.begin(begin(total_bytes=20 << 20), 1)
        assert here.budget.reserved == 20 << 20
        with pytest.raises(WeightSyncError) as caught:
            await here.pushes.begin(begin(total_bytes=20 << 20), 1)
        assert caught.value.reason is Reason.MEMORY_EXHAUSTED
        shard = make_shard(0, [("t", "U8", (6 << 20,), bytes(6 << 20))])
        await here.join(first.push_id, [*shard.layout(), *shard.chunks()[:1]])
        assert here.budget.reserved == 20 << 20
        await here.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
        assert here.budget.reserved == 8 << 20


async def test_a_cancelled_creation_leaks_nothing(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Segment] = []
    create = Segment.create
    go = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(size: int) -> Segment:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        made.append(create(size))
        return made[-1]

    monkeypatch.setattr("weightsync_server.residency.segment_allocator.Segment.create", slow)
    task = asyncio.create_task(here.model.segments.create(1 << 20))
    await asyncio.sleep(0.01)
    assert here.budget.reserved == 1 << 20
    task.cancel()
    await asyncio.wait([task])
    go.set()
    for _ in range(100):
        await asyncio.sleep(0.01)
        if here.budget.reserved == 0:
            break
    assert here.budget.reserved == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0].fd)


async def test_few_segments_are_made_at_once(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    create, lock, begun, most = Segment.create, threading.Lock(), [0], [0]

    def counted(size: int) -> Segment:
        with lock:
            begun[0] += 1
            most[0] = max(most[0], begun[0])
        time.sleep(0.02)
        try:
            return create(size)
        finally:
            with lock:
                begun[0] -= 1

    monkeypatch.setattr("weightsync_server.residency.segment_allocator.Segment.create", counted)
    keeper = here.model.segments
    made = await asyncio.gather(*(keeper.create(1) for _ in range(3 * MAKERS + 1)))
    assert most[0] == MAKERS
    for segment in made:
        keeper.retire(segment)
    await keeper.unmapped()
    assert here.budget.reserved == 0


async def test_memory_that_the_host_refuses(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Any:
        raise WeightSyncError(Reason.MEMORY_EXHAUSTED, f"the host refused {size}")

    monkeypatch.setattr("weightsync_server.residency.segment_allocator.Segment.create", refuse)
    with pytest.raises(WeightSyncError, match="the host refused"):
        await here.push(simple())
    assert here.budget.reserved == 0
    assert here.budget._untouched == 0
    monkeypatch.undo()
    assert await here.push(simple()) == 1


def cgroup(folder: Path, limit: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limits, "_own_cgroup", lambda: "a/b")
    host = process_limits.available_bytes(tmp_path)
    assert host > 1 << 20
    cgroup(tmp_path / "a" / "b", "max", 0, 0)
    assert process_limits.available_bytes(tmp_path) > 1 << 20
    cgroup_of = tmp_path / "a"
    (cgroup_of / "memory.max").write_text("5000000")
    (cgroup_of / "memory.current").write_text("4000000")
    (cgroup_of / "memory.stat").write_text("inactive_file 300000\nx 1")
    assert process_limits.available_bytes(tmp_path) == 1_300_000


def test_a_budget_looks_at_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1 << 30
    monkeypatch.setattr(segment_allocator, "available_bytes", lambda: free)
    assert SegmentBudget().limit == free * 8 // 10
    budget = SegmentBudget(1 << 40)
    budget.reserve(600 << 20)
    # Reserved and not touched yet: the host's numbers do not show it.
    with pytest.raises(WeightSyncError) as caught:
        budget.reserve(600 << 20)
    assert caught.value.reason is Reason.MEMORY_EXHAUSTED
    assert caught.value.metadata["needed_bytes"] == str(600 << 20)
    budget.touched(600 << 20)
    budget.reserve(600 << 20)
    budget.release(600 << 20, touched=False)
    assert budget.reserved == 600 << 20


async def test_lent_memory_is_neither_reused_nor_free_before_it_is_closed(here: World) -> None:
    await here.push(sized(1, 3 << 20))
    begun = await here.pushes.begin(begin(), 10)
    messages = [pb.PushWeightsRequest(join=pb.JoinPush(push_id=begun.push_id))]
    await here.pushes.stream(sending([*messages, *sized(2, 3 << 20)[0].layout()]))
    slot = next(s for s in here.model.slots.slots if s.record and s.record.version == 2)
    async with asyncio.timeout(20):
        while not slot.segments:  # noqa: ASYNC110 - it is made in a thread
            await asyncio.sleep(0.01)
    (segment,) = slot.segments.values()
    fd = segment.lend()
    await here.pushes.abort(pb.AbortPushRequest(push_id=begun.push_id))
    keeper, budget = here.model.segments, here.model.segments.budget
    assert keeper.retired_bytes == segment.capacity
    assert budget.reserved == here.model.slots.reserved_bytes + segment.capacity
    await here.push(sized(3, 3 << 20))
    assert all(segment not in other.segments.values() for other in here.model.slots.slots)
    os.close(fd)
    async with asyncio.timeout(20):
        while keeper.retired_bytes:  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)
    await keeper.unmapped()
    assert budget.reserved == here.model.slots.reserved_bytes
