"""Pushes that nobody sends any more: their slot is free, and they go on as if nothing had been."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.deltas import delta_begin, delta_of
from tests.unit.server.deltas.pushing import history
from tests.unit.server.push.test_resume import (
    CHUNK,
    LIMITS,
    finish,
    half,
    received,
    shards,
    until,
)
from tests.unit.server.world import Threads, World, begin, content, sending, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

#: Asleep after a quarter of a second.
SLEEPY = LIMITS | {"resume_timeout_s": 5.0}


def life(folder: Path, **more: Any) -> AbstractAsyncContextManager[World]:
    return world(folder, limits=SLEEPY | more.pop("limits", {}), **more)


def states(here: World) -> list[str]:
    return [slot.state for slot in here.model.slots.status()]


async def asleep(here: World, push_id: str) -> None:
    push = here.pushes.find(push_id)
    await until(lambda: push.state.suspended is not None)


async def test_its_slot_is_free_and_nothing_that_came_is_sent_again(tmp_path: Path) -> None:
    async with life(tmp_path) as here:
        begun = await half(here)
        await asleep(here, begun.push_id)
        assert states(here) == ["free", "free"]
        assert here.model.disk.promised == 0
        assert here.model.table.get(1).durability == pb.DURABILITY_RECEIVING
        told = here.pushes.get(pb.GetPushRequest(push_id=begun.push_id))
        whole = {0: 22 * CHUNK, 1: len(shards()[1].data)}
        assert received(list(told.shards)) == whole
        # Others take both slots, and end.
        others = [await here.pushes.begin(begin(version=version), 0) for version in (5, 6)]
        for other in others:
            await here.pushes.abort(pb.AbortPushRequest(push_id=other.push_id))
        again = await here.pushes.begin(begin(shard_count=2, idempotency_key="k"), None)
        assert again.push_id == begun.push_id
        assert received(list(again.shards)) == whole
        response = await finish(here, begun.push_id, 22 * CHUNK)
        assert not response.already
        assert here.read(1) == [shard.data for shard in shards()]
        assert here.meters.pushes == {"aborted": 2, "committed": 1}
        # Not the time in which nobody sent it.
        assert len(here.meters.phases["receive"]) == 1


@pytest.mark.parametrize("how", ["commit", "stream"])
async def test_it_sleeps_and_wakes_again_and_again(tmp_path: Path, how: str) -> None:
    first, second = shards()
    async with life(tmp_path) as here:
        begun = await half(here)
        for offset in (22, 30):
            await asleep(here, begun.push_id)
            rest = first.chunks(CHUNK)[offset : offset + 8]
            await here.join(begun.push_id, [*rest, *first.given(), *second.given()])
        await here.join(begun.push_id, first.chunks(CHUNK)[38:])
        await asleep(here, begun.push_id)
        request = pb.CommitPushRequest(push_id=begun.push_id, content_digest=content(shards()))
        if how == "commit":
            response = await here.pushes.commit(request)
        else:
            messages = [pb.PushWeightsRequest(commit=request)]
            response = (await here.join(begun.push_id, messages)).commit
        assert response.version == 1
        assert here.read(1) == [shard.data for shard in shards()]
        # Nothing came after it was woken last.
        assert "receive" not in here.meters.phases


async def test_a_layout_without_bytes_is_not_asked_for_again(tmp_path: Path) -> None:
    async with life(tmp_path) as here:
        begun = await here.pushes.begin(begin(), None)
        await here.join(begun.push_id, [m for shard in shards() for m in shard.layout()])
        await asleep(here, begun.push_id)
        await here.join(begun.push_id, [m for shard in shards() for m in shard.chunks(CHUNK)])
        await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
        assert here.read(1) == [shard.data for shard in shards()]


async def test_a_known_layout_is_known_when_it_wakes(tmp_path: Path) -> None:
    async with life(tmp_path) as here:
        await here.push(shards(1))
        digest = here.model.table.get(1).to_info().layout_digest
        begun = await here.pushes.begin(begin(layout_digest=digest), None)
        await here.join(begun.push_id, shards()[1].chunks(CHUNK))
        await asleep(here, begun.push_id)
        await here.join(begun.push_id, shards()[0].chunks(CHUNK))
        await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
        assert here.read(2) == [shard.data for shard in shards()]


async def test_a_delta_gives_its_memory_back_and_keeps_its_base(tmp_path: Path) -> None:
    contents = history(1)
    parts = delta_of(contents[0], contents[1])
    async with life(tmp_path) as here:
        await here.push(contents[0], 1)
        fields = delta_begin(contents[0], version=2, shard_count=2, idempotency_key="k")
        begun = await here.pushes.begin(begin(**fields), None)
        await here.join(begun.push_id, parts[1].all(CHUNK))
        await asleep(here, begun.push_id)
        assert states(here) == ["staged", "free"]
        held = sum(slot.reserved_bytes for slot in here.model.slots.slots)
        assert here.model.slots.reserved_bytes == held
        assert here.model.table.get(1).holds == 1
        await here.join(begun.push_id, parts[0].all(CHUNK))
        request = pb.CommitPushRequest(push_id=begun.push_id, content_digest=content(contents[1]))
        await here.pushes.commit(request)
        assert here.read(2) == [shard.data for shard in contents[1]]
        assert here.model.table.get(1).holds == 0


async def test_an_open_stream_keeps_it_awake(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def slow(push_id: str) -> AsyncIterator[Any]:
        async for message in sending([pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))]):
            yield message
        await over.wait()

    async with life(tmp_path) as here:
        begun = await half(here)
        stream = asyncio.create_task(here.pushes.stream(slow(begun.push_id)))
        await asyncio.sleep(0.7)
        assert states(here) == ["receiving", "free"]
        over.set()
        await stream
        await asleep(here, begun.push_id)


async def test_what_an_apply_relies_on_stays_until_it_has_ended(tmp_path: Path) -> None:
    async with life(tmp_path) as here:
        begun = await half(here)
        await here.join(begun.push_id, shards()[0].chunks(CHUNK, 22 * CHUNK))
        push = here.pushes.find(begun.push_id)
        await until(lambda: here.model.table.get(1).residency == pb.RESIDENCY_STAGED)
        lease = await here.model.stager.stage(1, 5, durable=False)
        await asyncio.sleep(0.7)
        assert push.state.suspended is None
        assert here.read(1) == [shard.data for shard in shards()]
        lease.release()
        await asleep(here, begun.push_id)
        with pytest.raises(WeightSyncError) as caught:
            await here.model.stager.stage(1, 5, durable=False)
        assert caught.value.reason is Reason.PUSH_INCOMPLETE
        await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
        assert here.read(1) == [shard.data for shard in shards()]


async def test_in_memory_it_keeps_its_slot(tmp_path: Path) -> None:
    async with life(tmp_path, store="memory://") as here:
        begun = await here.pushes.begin(begin(), None)
        await here.join(begun.push_id, shards()[0].all(CHUNK))
        await asyncio.sleep(0.7)
        assert states(here) == ["receiving", "free"]
        await here.join(begun.push_id, shards()[1].all(CHUNK))
        await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))


async def test_who_calls_while_it_falls_asleep_wakes_it(tmp_path: Path) -> None:
    disk = Threads()
    async with life(tmp_path, fetchers=disk) as here:
        begun = await half(here, 23)
        push = here.pushes.find(begun.push_id)
        assert push.state.shards[0].durable_bytes < push.state.shards[0].received
        disk.gate = asyncio.Event()
        await until(lambda: push.lifecycle.tasks.suspending is not None)
        joining = asyncio.create_task(
            here.join(begun.push_id, shards()[0].chunks(CHUNK, 23 * CHUNK))
        )
        aborted = asyncio.create_task(
            here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
        )
        await asyncio.sleep(0.05)
        assert push.state.streams == 0
        disk.gate.set()
        await joining
        await asyncio.gather(aborted, return_exceptions=True)
        await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
        assert here.read(1) == [shard.data for shard in shards()]


@pytest.mark.parametrize("when", ["falling", "asleep"])
async def test_an_abort_leaves_nothing(tmp_path: Path, when: str) -> None:
    disk = Threads()
    async with life(tmp_path, fetchers=disk) as here:
        begun = await half(here, 23)
        push = here.pushes.find(begun.push_id)
        if when == "falling":
            disk.gate = asyncio.Event()
            await until(lambda: push.lifecycle.tasks.suspending is not None)
        else:
            await asleep(here, begun.push_id)
        await here.pushes.abort(pb.AbortPushRequest(push_id=begun.push_id))
        assert states(here) == ["free", "free"]
        assert here.model.disk.promised == 0
        assert here.pushes.status() == []
        assert not (tmp_path / "store" / "m" / "v1").exists()


async def test_what_cannot_be_made_durable_is_sent_again(tmp_path: Path) -> None:
    disk = Threads()
    async with life(tmp_path, fetchers=disk) as here:
        begun = await half(here, 23)
        disk.full = True
        await asleep(here, begun.push_id)
        disk.full = False
        offsets = received(list(here.pushes.get(pb.GetPushRequest(push_id=begun.push_id)).shards))
        assert 0 < offsets[0] < 23 * CHUNK
        await finish(here, begun.push_id, offsets[0])
        assert here.read(1) == [shard.data for shard in shards()]


async def test_it_is_dropped_when_it_was_idle_too_long_all_the_same(tmp_path: Path) -> None:
    async with life(tmp_path, limits={"resume_timeout_s": 1.0}) as here:
        begun = await half(here)
        await asleep(here, begun.push_id)
        assert list(here.pushes.overdue()) == []
        await until(lambda: here.model.table.find(1) is None)
        assert not (tmp_path / "store" / "m" / "v1").exists()
