"""Any order of shards, streams, cuts and resumes gives the same version."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.server.world import (
    Shard,
    World,
    begin,
    chunk,
    content,
    make_shard,
    world,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=4)


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Draw steps: which stream, which shard, how many bytes (0: the stream is cut)."""
    step = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 200))
    return draw(st.lists(step, max_size=40))


class Trainer:
    """A stream that is fed step by step and tells what came of each."""

    def __init__(self, here: World, push: str) -> None:
        self.queue: asyncio.Queue[pb.PushWeightsRequest | None] = asyncio.Queue()
        self.idle = asyncio.Event()
        self.feed(pb.PushWeightsRequest(join=pb.JoinPush(push_id=push)))
        self.task = asyncio.create_task(here.pushes.stream(self.messages()))

    def feed(self, message: pb.PushWeightsRequest) -> None:
        self.idle.clear()
        self.queue.put_nowait(message)

    async def messages(self) -> AsyncIterator[pb.PushWeightsRequest]:
        while True:
            if self.queue.empty():
                # The server asks for more: it has done with all that was fed.
                self.idle.set()
            message = await self.queue.get()
            if message is None:
                return
            yield message

    async def settle(self) -> WeightSyncError | None:
        """Wait until everything fed was taken, or the stream ended with an error."""
        idle = asyncio.create_task(self.idle.wait())
        await asyncio.wait([idle, self.task], return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if not self.task.done():
            return None
        error = self.task.exception()
        assert isinstance(error, WeightSyncError)
        return error

    async def end(self) -> None:
        if not self.task.done():
            self.queue.put_nowait(None)
        await asyncio.wait([self.task])


def offsets(here: World, push: str) -> dict[int, int]:
    state = here.pushes.get(pb.GetPushRequest(push_id=push))
    return {shard.shard: shard.received_bytes for shard in state.shards}


async def play(sizes: list[int], plan: list[tuple[int, int, int]], folder: Path) -> None:
    shards = [
        make_shard(i, [(f"t{i}", "U8", (size,), bytes((i + j) % 256 for j in range(size)))])
        for i, size in enumerate(sizes)
    ]
    async with world(folder, store="memory://") as here:
        push = (await here.pushes.begin(begin(shard_count=len(shards)), 1)).push_id
        streams: dict[int, Trainer] = {}
        for stream, number, count in plan:
            await step(here, push, streams, stream, shards[number % len(shards)], count)
        for trainer in streams.values():
            await trainer.end()
        here_now = offsets(here, push)
        rest = [
            message
            for shard in shards
            for message in (
                *shard.layout(),
                *shard.chunks(77, start=here_now.get(shard.index, 0)),
                *shard.given(),
            )
        ]
        await here.join(push, rest)
        response = await here.pushes.commit(pb.CommitPushRequest(push_id=push))
        assert response.content_digest == content(shards)
        assert here.read(1) == [shard.data for shard in shards]
        assert here.model.table.get(1).to_info().trainer_verified
        assert here.meters.received == sum(len(shard.data) for shard in shards)


async def step(
    here: World, push: str, streams: dict[int, Trainer], number: int, shard: Shard, count: int
) -> None:
    trainer = streams.get(number)
    if trainer is None:
        trainer = streams[number] = Trainer(here, push)
    if count == 0:
        await streams.pop(number).end()
        return
    before = offsets(here, push)
    if shard.index not in before:
        trainer.feed(shard.layout()[0])
    # Some bytes again, some new ones, now and then a gap.
    at = max(0, before.get(shard.index, 0) - count // 3) if count % 7 else count * 3
    trainer.feed(chunk(shard.index, at, shard.data[at : at + count]))
    error = await trainer.settle()
    after = offsets(here, push)
    assert all(after[index] >= before[index] for index in before), "acknowledged bytes stay"
    if error is not None:
        del streams[number]
        assert error.reason in {Reason.OFFSET_MISMATCH, Reason.SHARD_BUSY, Reason.REQUEST_INVALID}
        if error.reason is not Reason.REQUEST_INVALID:
            assert error.metadata["received_bytes"] == str(after[shard.index])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, plan=plans())
def test_any_interleaving_with_cuts_and_resume(
    sizes: list[int], plan: list[tuple[int, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(sizes, plan, Path(folder)))
