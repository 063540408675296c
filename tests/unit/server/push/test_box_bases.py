"""Writers send what changed in their boxes since a version that lies in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.server.deltas.pushing import until
from tests.unit.server.push.boxes import Held, Part, Writer, part, push_all, sharded, version
from tests.unit.server.world import World, chunk, content, make_shard, world
from weightsync.delta import encode_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.tensor_slices import Box, slice_name
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.workers.fetch.fetch_pool import FetcherPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from tests.unit.server.world import Shard


@pytest.fixture(name="box_world")
async def _box_world(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, slots=3, limits={"writer_timeout_s": 5}) as made:
        yield made


@dataclass
class Changed(Held):
    """What a writer brings of one shard: what changed since a version of the same layout."""

    base: str = ""
    before: Held | None = None
    blob: bytes = b""

    def encode(self) -> None:
        assert self.before is not None
        pairs = zip(self.before.sent, self.sent, strict=True)
        items = [self._item(old, new) for old, new in pairs]
        facts: dict[str, Any] = {"base_content_digest": self.base, "layout_digest": "0" * 32}
        self.blob = encode_shard(items, index=0, zstd=False, **facts).blob.tobytes()

    def _item(self, old: Part, new: Part) -> Any:
        entry = self.shard.entries[new.tensor]
        data = (np.frombuffer(part.data, np.uint8) for part in (old, new))
        return (slice_name(entry.name, new.box), entry.dtype, new.box.sizes, *data)

    def boxes(self) -> pb.PushWeightsRequest:
        request = super().boxes()
        request.boxes.patch_bytes = len(self.blob)
        return request

    def chunks(self, start: int = 0) -> Iterator[pb.PushWeightsRequest]:
        for at in range(start, len(self.blob), self.chunk_bytes):
            yield chunk(self.shard.index, at, self.blob[at : at + self.chunk_bytes])


def large(seed: int) -> list[Shard]:
    """Return one shard, large enough for a change of it to be less."""
    data = np.random.default_rng(seed).bytes(4 * 64 * 128)
    return [make_shard(0, [("m", "F32", (64, 128), data), ("quiet", "F32", (512,), bytes(2048))])]


def after(shards: Sequence[Shard]) -> list[Shard]:
    """Return the version in which some elements of the matrix are others."""
    (shard,) = shards
    start = 8 + shard.header_size
    matrix, quiet = (shard.data[start + e.begin : start + e.end] for e in shard.entries)
    values = np.frombuffer(matrix, np.float32).copy()
    values[::97] += 1
    return [
        make_shard(0, [("m", "F32", (64, 128), values.tobytes()), ("quiet", "F32", (512,), quiet)])
    ]


async def base_of(here: World, along: int = 0) -> tuple[list[Shard], pb.CommitPushResponse]:
    """Push a version by two writers."""
    shards = large(1)
    replies = await push_all(here, sharded(shards, 2, along=along, key="run/0"))
    return shards, replies[0]


def changes(
    before: Sequence[Shard],
    now: Sequence[Shard],
    base: str,
    along: int = 0,
    wrong: Sequence[Shard] | None = None,
) -> list[Writer]:
    """Return writers that send what changed; with `wrong` their deltas make that instead."""
    old = sharded(before, 2, along=along)
    new = sharded(now, 2, along=along)
    other = sharded(wrong or now, 2, along=along)
    for writer, theirs, made in zip(new, old, other, strict=True):
        held = writer.held[0]
        delta = Changed(held.shard, made.held[0].sent, held.replicas, 200, base, theirs.held[0])
        delta.encode()
        delta.sent = held.sent
        writer.held = [delta]
    return new


async def begin(here: World, writer: Writer, base: str) -> pb.BeginPushResponse:
    layout = here.model.table.get(1).to_info().layout_digest
    facts: dict[str, Any] = {"base_content_digest": base, "layout_digest": layout}
    return await writer.begin(here, kind=pb.PUSH_KIND_DELTA, **facts)


async def push(here: World, writer: Writer, base: str) -> pb.CommitPushResponse:
    await begin(here, writer, base)
    await writer.stream(here)
    return await writer.commit(here)


@pytest.mark.parametrize("along", [0, 1])
async def test_what_changed_makes_the_version(box_world: World, along: int) -> None:
    before, reply = await base_of(box_world, along)
    now = after(before)
    writers = changes(before, now, reply.content_digest, along)
    replies = await asyncio.gather(*(push(box_world, w, reply.content_digest) for w in writers))
    assert {one.content_digest for one in replies} == {content(now)}
    assert box_world.read(replies[0].version) == [now[0].data]
    assert box_world.read(1) == [before[0].data]


async def test_status_counts_the_boxes_that_changes_stand_for(box_world: World) -> None:
    before, base = await base_of(box_world)
    first, second = changes(before, after(before), base.content_digest)
    for writer in (first, second):
        await begin(box_world, writer, base.content_digest)
    await first.stream(box_world)
    (push,) = box_world.pushes.status()
    ours = sum(len(part.data) for part in first.held[0].sent)
    assert push.received_bytes == ours < push.declared_bytes == len(before[0].data)
    await second.stream(box_world)
    (push,) = box_world.pushes.status()
    assert push.received_bytes == push.declared_bytes


async def test_its_base_stays_in_memory_until_the_push_has_ended(box_world: World) -> None:
    before, reply = await base_of(box_world)
    slot = box_world.model.table.get(1).slot
    first, other = changes(before, after(before), reply.content_digest)
    await begin(box_world, first, reply.content_digest)
    await begin(box_world, first, reply.content_digest)
    await begin(box_world, other, reply.content_digest)
    assert slot is not None
    # One for both.
    assert slot.leases == 1
    await box_world.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
    assert slot.leases == 0
    used = box_world.model.slots.reserved_bytes
    writers = changes(before, after(before), reply.content_digest)
    await asyncio.gather(*(push(box_world, w, reply.content_digest) for w in writers))
    assert slot.leases == 0
    assert box_world.model.slots.reserved_bytes == used


async def test_one_sends_changes_and_the_other_its_boxes(box_world: World) -> None:
    before, reply = await base_of(box_world)
    now = after(before)
    first, _ = changes(before, now, reply.content_digest)
    _, whole = sharded(now, 2)
    replies = await asyncio.gather(
        push(box_world, first, reply.content_digest), whole.push(box_world)
    )
    assert box_world.read(replies[1].version) == [now[0].data]


async def test_without_the_base_in_memory_a_writer_is_told_and_can_send_all(
    box_world: World,
) -> None:
    before, reply = await base_of(box_world)
    box_world.model.slots.release(box_world.model.table.get(1))
    now = after(before)
    first, other = sharded(now, 2)
    with pytest.raises(WeightSyncError, match="is no longer in memory") as caught:
        await begin(box_world, first, reply.content_digest)
    assert caught.value.reason is Reason.BASE_MISMATCH
    replies = await asyncio.gather(first.push(box_world), other.push(box_world))
    assert box_world.read(replies[0].version) == [now[0].data]


async def test_tensors_that_lie_otherwise_are_no_base(box_world: World) -> None:
    _, reply = await base_of(box_world)
    writer, _ = sharded(version(), 2)
    facts = {"kind": pb.PUSH_KIND_DELTA, "base_content_digest": reply.content_digest}
    with pytest.raises(WeightSyncError, match="laid out differently in version 1") as caught:
        await writer.begin(box_world, **facts)
    assert caught.value.reason is Reason.BASE_MISMATCH


async def test_changes_that_make_other_bytes_fail_the_push_for_all(box_world: World) -> None:
    before, reply = await base_of(box_world)
    writers = changes(before, after(before), reply.content_digest, wrong=after(after(before)))
    pushes = [push(box_world, writer, reply.content_digest) for writer in writers]
    errors = await asyncio.gather(*pushes, return_exceptions=True)
    for error in errors:
        assert isinstance(error, WeightSyncError)
        assert error.reason is Reason.DIGEST_MISMATCH
        assert "arrived from writer" in error.message


async def test_changes_of_another_base_are_refused_with_the_writer(box_world: World) -> None:
    before, reply = await base_of(box_world)
    writers = changes(before, after(before), "ab" * 16)
    pushes = [push(box_world, writer, reply.content_digest) for writer in writers]
    errors = await asyncio.gather(*pushes, return_exceptions=True)
    for error in errors:
        assert isinstance(error, WeightSyncError)
        assert error.reason is Reason.SHARD_INVALID
        assert "the changes of writer" in error.message


async def test_changes_without_a_base_and_larger_than_the_boxes_are_refused(
    box_world: World,
) -> None:
    before, reply = await base_of(box_world)
    first, _ = changes(before, after(before), reply.content_digest)
    await first.begin(box_world)
    with pytest.raises(WeightSyncError, match="named no base"):
        await first.stream(box_world)
    await box_world.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
    first, _ = changes(before, after(before), reply.content_digest)
    first.key = "run/2"
    held = first.held[0]
    assert isinstance(held, Changed)
    held.blob = bytes(16_384 + sum(len(part.data) for part in held.sent))
    await begin(box_world, first, reply.content_digest)
    with pytest.raises(WeightSyncError, match="send those"):
        await first.stream(box_world)


async def test_a_writer_that_declares_again_goes_on_where_it_was(box_world: World) -> None:
    before, reply = await base_of(box_world)
    now = after(before)
    first, other = changes(before, now, reply.content_digest)
    await begin(box_world, first, reply.content_digest)
    held = first.held[0]
    await first.stream(box_world, [*held.shard.layout(), held.boxes(), next(held.chunks())])
    response = await begin(box_world, first, reply.content_digest)
    (progress,) = response.shards
    assert progress.received_bytes == 200
    rest = list(held.chunks(200))
    await first.stream(box_world, [held.boxes(), *rest, held.digests()])
    replies = await asyncio.gather(
        first.commit(box_world), push(box_world, other, reply.content_digest)
    )
    assert box_world.read(replies[0].version) == [now[0].data]


async def test_memory_that_comes_after_the_push_has_ended_is_given_back(
    box_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, reply = await base_of(box_world)
    first, _ = changes(before, after(before), reply.content_digest)
    await begin(box_world, first, reply.content_digest)
    slots, gate = box_world.model.slots, asyncio.Event()
    segment = slots.segment

    async def late(slot: Any, shard: int, size: int) -> Any:
        if slot.index < 0:
            await gate.wait()
        return await segment(slot, shard, size)

    monkeypatch.setattr(slots, "segment", late)
    held = first.held[0]
    streaming = asyncio.create_task(first.stream(box_world, [*held.shard.layout(), held.boxes()]))
    await until(lambda: len(slots._scratch) == 1)
    await box_world.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
    gate.set()
    with pytest.raises(WeightSyncError, match="gave the push up"):
        await streaming
    # Once no fetcher maps it any more.
    await until(lambda: box_world.budget.reserved == slots.reserved_bytes)


async def test_two_that_send_changes_of_one_box_make_it_once(tmp_path: Path) -> None:
    fetchers = FetcherPool(2)
    await fetchers.start()
    try:
        async with world(tmp_path, slots=4, fetchers=fetchers) as here:
            shape = (1024, 1024)
            old = np.arange(1 << 20, dtype=np.uint16)
            new = old.copy()
            new[::7] += 1
            versions = [[make_shard(0, [("m", "BF16", shape, a.tobytes())])] for a in (old, new)]
            whole = Box((0, 0), shape)

            def both(shards: Sequence[Shard], key: str) -> list[Writer]:
                held = [[Held(shards[0], [part(shards[0], 0, whole)])] for _ in range(2)]
                return [Writer(number, 2, one, key) for number, one in enumerate(held)]

            reply = (await push_all(here, both(versions[0], "run/0")))[0]
            writers = both(versions[1], "run/1")
            for writer in writers:
                plain, base = writer.held[0], part(versions[0][0], 0, whole)
                delta = Changed(plain.shard, plain.sent, [], 1 << 20, reply.content_digest)
                delta.before = Held(plain.shard, [base])
                delta.encode()
                writer.held = [delta]
            replies = await asyncio.gather(*(push(here, w, reply.content_digest) for w in writers))
            assert here.read(replies[0].version) == [versions[1][0].data]
    finally:
        await fetchers.stop()
