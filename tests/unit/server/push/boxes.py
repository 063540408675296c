"""Versions cut into boxes for several writers, and what each of them sends."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.unit.server.world import begin, chunk, make_shard, sending
from weightsync.model.digest import tensor_digest
from weightsync.model.tensor_slices import Box
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.unit.server.world import Shard, World

WIDTH = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass
class Part:
    """A box that a writer holds, and its bytes."""

    tensor: int
    box: Box
    data: bytes

    def wire(self) -> pb.Box:
        return pb.Box(tensor=self.tensor, offsets=self.box.offsets, sizes=self.box.sizes)


@dataclass
class Held:
    """What a writer brings of one shard."""

    shard: Shard
    sent: list[Part] = field(default_factory=list)
    replicas: list[Part] = field(default_factory=list)
    chunk_bytes: int = 1 << 20

    def boxes(self) -> pb.PushWeightsRequest:
        return pb.PushWeightsRequest(
            boxes=pb.BoxPart(
                shard=self.shard.index,
                sent=[part.wire() for part in self.sent],
                replicas=[part.wire() for part in self.replicas],
                last=True,
            )
        )

    def chunks(self, start: int = 0) -> Iterator[pb.PushWeightsRequest]:
        data = b"".join(part.data for part in self.sent)
        for at in range(start, len(data), self.chunk_bytes):
            yield chunk(self.shard.index, at, data[at : at + self.chunk_bytes])

    def digests(self) -> pb.PushWeightsRequest:
        each = [tensor_digest(part.data) for part in self.sent + self.replicas]
        return pb.PushWeightsRequest(
            digests=pb.ShardDigests(shard=self.shard.index, first=0, digests=b"".join(each))
        )

    def all(self) -> Iterator[pb.PushWeightsRequest]:
        yield from self.shard.layout()
        yield self.boxes()
        yield from self.chunks()
        yield self.digests()


@dataclass
class Writer:
    """One of several processes that push a version together."""

    number: int
    of: int
    held: list[Held]
    key: str = "run/1"
    push_id: str = ""

    def request(self, **fields: Any) -> pb.BeginPushRequest:
        shards = [held.shard for held in self.held]
        told: dict[str, Any] = {
            "idempotency_key": self.key,
            "writers": self.of,
            "writer": self.number,
            "total_bytes": sum(len(shard.data) for shard in shards),
            "shard_count": len(shards),
        }
        return begin(**(told | fields))

    async def begin(self, here: World, **fields: Any) -> pb.BeginPushResponse:
        response = await here.pushes.begin(self.request(**fields), None)
        self.push_id = response.push_id
        return response

    async def stream(
        self, here: World, messages: Sequence[pb.PushWeightsRequest] | None = None
    ) -> pb.PushWeightsResponse:
        if messages is None:
            messages = [message for held in self.held for message in held.all()]
        join = pb.JoinPush(push_id=self.push_id, writer=self.number)
        return await here.pushes.stream(sending([pb.PushWeightsRequest(join=join), *messages]))

    async def commit(self, here: World) -> pb.CommitPushResponse:
        request = pb.CommitPushRequest(push_id=self.push_id, writer=self.number)
        return await here.pushes.commit(request)

    async def push(self, here: World) -> pb.CommitPushResponse:
        await self.begin(here)
        await self.stream(here)
        return await self.commit(here)


def version(seed: int = 0, shards: int = 2) -> list[Shard]:
    """Return shards of matrices, a vector, a number and an empty tensor."""
    rng = random.Random(seed)
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("BF16", (12, 8)), ("F32", (6, 4, 8)), ("BF16", (16,)), ("F32", ()), ("BF16", (0, 4)),
    ]  # fmt: skip
    made = []
    for index in range(shards):
        tensors = []
        for at, (dtype, shape) in enumerate(shapes):
            size = int(np.prod(shape, dtype=int)) * WIDTH[dtype]
            tensors.append((f"s{index}.t{at}", dtype, shape, rng.randbytes(size)))
        made.append(make_shard(index, tensors))
    return made


def part(shard: Shard, tensor: int, box: Box) -> Part:
    entry = shard.entries[tensor]
    start = 8 + shard.header_size + entry.begin
    data = shard.data[start : 8 + shard.header_size + entry.end]
    whole = np.frombuffer(data, np.uint8).reshape(*entry.shape, WIDTH[entry.dtype])
    return Part(tensor, box, whole[box.slices].tobytes())


def cut(shape: tuple[int, ...], count: int, along: int) -> list[Box]:
    """Return a tensor in so many boxes, along one dimension and unevenly; some may be empty."""
    if not shape:
        return [Box((), ())]
    step = -(-shape[along] // count)
    ends = [min(at * step, shape[along]) for at in range(count + 1)]
    boxes = []
    for low, high in itertools.pairwise(ends):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[along], sizes[along] = low, high - low
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def sharded(
    shards: Sequence[Shard], count: int, *, along: int = 0, key: str = "run/1"
) -> list[Writer]:
    """Return writers that hold a box of every tensor; of one without dimensions all hold all."""
    writers = [
        Writer(number, count, [Held(shard) for shard in shards], key) for number in range(count)
    ]
    for at, shard in enumerate(shards):
        for tensor, entry in enumerate(shard.entries):
            boxes = cut(entry.shape, count, min(along, max(len(entry.shape) - 1, 0)))
            for writer in writers:
                held = writer.held[at]
                if (
                    len(boxes) == count
                    and not boxes[writer.number].elements
                    and 0 not in entry.shape
                ):
                    continue
                if len(boxes) == count and (count > 1 or entry.shape):
                    held.sent.append(part(shard, tensor, boxes[writer.number]))
                elif writer.number == 0:
                    held.sent.append(part(shard, tensor, boxes[0]))
                else:
                    held.replicas.append(part(shard, tensor, boxes[0]))
    return writers


async def push_all(here: World, writers: Sequence[Writer]) -> list[pb.CommitPushResponse]:
    return await asyncio.gather(*(writer.push(here) for writer in writers))
