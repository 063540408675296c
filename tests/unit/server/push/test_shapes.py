"""Every dtype and shape that safetensors knows, and very many tensors."""

from __future__ import annotations

import asyncio
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.world import (
    Tensor,
    World,
    begin,
    content,
    make_shard,
    one_stream,
    real_fetchers,
    sending,
    world,
)
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.layout import parse_header
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from weightsync_server.store.store_records import CommitRecord

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (1,), (8,), (2, 4), (1,) * 32)


def tensors() -> list[Tensor]:
    made: list[Tensor] = []
    source = random.Random(1)
    for dtype, bits in DTYPE_BITS.items():
        for shape in SHAPES:
            total = math.prod(shape) * bits
            if total % 8 == 0:
                name = f"{dtype}.{'x'.join(map(str, shape))}.é"
                made.append((name, dtype, shape, source.randbytes(total // 8)))
    made.append(("nan", "F32", (2,), b"\x00\x00\xc0\x7f\x00\x00\x80\xff"))
    return made


def stored(here: World) -> list[bytes]:
    folder = Path(here.model.store.url.removeprefix("file://"))
    kept = sorted(folder.rglob("*.safetensors"), key=lambda path: int(path.stem))
    return [path.read_bytes() for path in kept]


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
async def test_every_dtype_and_shape(here: World, size: int) -> None:
    shards = [
        make_shard(0, tensors()),
        make_shard(1, []),
        make_shard(2, [("one byte", "U8", (), b"\x07")]),
        make_shard(3, [("empty", "BF16", (0, 7), b"")]),
    ]
    if size == 1:
        shards = [make_shard(0, tensors()[:20]), make_shard(1, [])]
    messages = [pb.PushWeightsRequest(begin=begin())]
    for shard in shards:
        messages += shard.all(size)
    messages.append(
        pb.PushWeightsRequest(commit=pb.CommitPushRequest(content_digest=content(shards)))
    )
    response = await here.pushes.stream(sending(messages))
    assert response.commit.tensor_count == sum(len(shard.entries) for shard in shards)
    assert here.read(1) == [shard.data for shard in shards]
    assert here.model.table.get(1).to_info().trainer_verified
    assert stored(here) == [shard.data for shard in shards]


async def test_37_000_tensors_keep_the_loop_free(tmp_path: Path) -> None:
    many: list[Tensor] = [
        (
            f"model.layers.{i // 600}.mlp.experts.{i % 600}.down_proj.weight",
            "BF16",
            (2, 4),
            b"\x01" * 16,
        )
        for i in range(37_000)
    ]
    shards = [make_shard(0, many)]
    messages = [pb.PushWeightsRequest(begin=begin())]
    for shard in shards:
        messages += [*shard.layout(8000), *shard.chunks(), *shard.given()]
    messages.append(
        pb.PushWeightsRequest(commit=pb.CommitPushRequest(content_digest=content(shards)))
    )
    assert max(message.ByteSize() for message in messages) < (1 << 20) + 100
    turns: list[float] = []
    stop = asyncio.Event()

    async def beat() -> None:
        # CPU time of the loop's thread, so that other load on the machine does not count.
        last = time.thread_time()
        while not stop.is_set():
            await asyncio.sleep(0.001)
            turns.append(time.thread_time() - last)
            last = time.thread_time()

    async def slowly() -> AsyncIterator[pb.PushWeightsRequest]:
        # As from a socket: other tasks get their turn between two messages.
        for message in messages:
            await asyncio.sleep(0)
            yield message

    async with real_fetchers() as fetchers, world(tmp_path, fetchers=fetchers) as here:
        heart = asyncio.create_task(beat())
        response = await here.pushes.stream(slowly())
        stop.set()
        await heart
        assert response.commit.tensor_count == 37_000
        assert here.read(1) == [shard.data for shard in shards]
        lease = await here.model.stager.stage(1, 20)
        await here.model.stager.verify(lease)
        lease.release()
        commit: CommitRecord | None = here.model.table.get(1).commit
        assert commit is not None
        # The second push names the layout and sends no header check of its own.
        again = await here.pushes.begin(begin(layout_digest=commit.layout_digest), 5)
        assert again.layout_known
        await here.join(again.push_id, [m for shard in shards for m in shard.chunks()])
        await here.pushes.commit(pb.CommitPushRequest(push_id=again.push_id))
    turns.sort()
    # What the header alone would take inline, here and now.
    begun = time.thread_time()
    data = shards[0].data
    parse_header(data[8 : 8 + int.from_bytes(data[:8], "little")], 0)
    inline = time.thread_time() - begun
    assert turns[len(turns) * 9 // 10] < inline / 10, (inline, turns[-5:])
    assert turns[-1] < inline, (inline, turns[-5:])


async def test_shards_of_other_sizes_reuse_and_replace_segments(here: World) -> None:
    for seed, sizes in enumerate(([10, 5_000_000], [5_000_000, 10], [100, 20, 3_000_000])):
        shards = [
            make_shard(i, [(f"t{i}", "U8", (size,), bytes([seed]) * size)])
            for i, size in enumerate(sizes)
        ]
        response = await here.pushes.stream(one_stream(shards))
        assert here.read(response.version) == [shard.data for shard in shards]
    await here.model.segments.unmapped()
    held = sum(slot.reserved_bytes for slot in here.model.slots.status())
    assert here.budget.reserved == held
