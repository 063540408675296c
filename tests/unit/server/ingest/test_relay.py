"""What an ingest process writes, and when: never into bytes that are complete."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.push.remote import DistantPushes
from tests.unit.server.world import World, begin, chunk, content, sending, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire import child_channel
from weightsync_server.ingest.relay import Relay
from weightsync_server.push import ChunkView, Claim, PushService, RemoteStream, Written
from weightsync_server.workers.runtime.mappings import Maps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from weightsync_server.push import Grant, Message


@pytest.fixture
async def distant(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, pushes_of=DistantPushes) as made:
        yield made


async def opened(here: World) -> str:
    return (await here.pushes.begin(begin(shard_count=1), 1)).push_id


def joined(push_id: str) -> pb.PushWeightsRequest:
    return pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - memory tells nobody
            await asyncio.sleep(0.01)


async def test_nothing_is_written_where_the_server_wrote_itself(distant: World) -> None:
    shard = simple()[0]
    half = len(shard.data) // 2
    push = await opened(distant)
    found = distant.pushes.find(push)
    plain = [*shard.layout(), chunk(0, 0, shard.data[:half])]
    stale = chunk(0, half, b"\xff" * (len(shard.data) - half))

    async def messages() -> AsyncIterator[Message]:
        async for message in sending([joined(push), *plain]):
            yield message
        # As no generated client writes it: what comes of it is the server's own work.
        yield pb.PushWeightsRequest(chunk=pb.Chunk(offset=half, data=shard.data[half:]))
        await until(lambda: bool(found.state.shards) and found.state.shards[0].complete)
        async for message in sending([stale]):
            yield message

    answer = await distant.pushes.stream(messages())
    assert answer.received_bytes == len(shard.data)
    commit = await distant.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert commit.content_digest == content([shard])
    assert distant.read(1) == [shard.data]


async def test_an_empty_chunk_at_the_end_changes_nothing(distant: World) -> None:
    shard = simple()[0]
    push = await opened(distant)
    end = pb.PushWeightsRequest(chunk=pb.Chunk(offset=len(shard.data)))
    await distant.join(push, [*shard.layout(), *shard.chunks(), end])
    await distant.join(push, [end])
    commit = await distant.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert commit.content_digest == content([shard])


async def test_whoever_may_write_has_let_go_before_a_commit(distant: World) -> None:
    shard = simple()[0]
    push = await opened(distant)
    rest = asyncio.Event()

    async def messages() -> AsyncIterator[Message]:
        async for message in sending([joined(push), *shard.layout(), *shard.chunks()]):
            yield message
        await rest.wait()

    stream = asyncio.create_task(distant.pushes.stream(messages()))
    found = distant.pushes.find(push)
    await until(lambda: bool(found.state.shards) and found.state.shards[0].complete)
    assert found.lifecycle.writers
    await distant.pushes.commit(pb.CommitPushRequest(push_id=push))
    async with asyncio.timeout(5):
        assert (await stream).received_bytes == len(shard.data)
    assert not found.lifecycle.writers


class _Rogue(RemoteStream):
    """A process that writes on after the shard is complete."""

    def __init__(self, messages: list[Message | Claim | Written]) -> None:
        self._messages = iter(messages)
        self.granted: Grant | None = None

    def __aiter__(self) -> AsyncIterator[Message | Claim | Written]:
        return self._all(self._messages)

    async def _all(
        self, messages: Iterator[Message | Claim | Written]
    ) -> AsyncIterator[Message | Claim | Written]:
        for message in messages:
            yield message

    def grant(self, grant: Grant) -> None:
        self.granted = grant

    def go_on(self, mark: int) -> None:
        assert mark

    async def cease(self) -> None:
        pass


async def test_a_process_that_writes_into_a_complete_shard_ends_the_push(distant: World) -> None:
    shard = simple()[0]
    push = await opened(distant)
    await distant.join(push, [*shard.layout(), *shard.chunks()])
    rogue = _Rogue([joined(push), Claim(0), Written(0, len(shard.data), due=True)])
    with pytest.raises(WeightSyncError) as caught:
        await PushService.stream(distant.pushes, rogue)
    assert caught.value.reason is Reason.FAULT
    assert rogue.granted is not None
    assert rogue.granted.received == len(shard.data)


async def test_what_was_written_is_told_once_there_is_room() -> None:
    there, here = socket.socketpair()
    there.setblocking(False)
    here.setblocking(False)
    inbox = bytearray()

    async def heard(op: str) -> dict[str, Any]:
        async with asyncio.timeout(5):
            while True:
                while (frame := child_channel.split(inbox)) is not None:
                    if frame[0]["op"] == op:
                        return frame[0]
                inbox.extend(await asyncio.get_running_loop().sock_recv(here, 1 << 16))

    async def messages() -> AsyncIterator[ChunkView]:
        yield ChunkView(0, 0, memoryview(b"x" * 10))
        await asyncio.Event().wait()

    running = asyncio.create_task(Relay(there, Maps()).run({"op": "call"}, messages()))
    await heard("claim")
    with contextlib.suppress(BlockingIOError):
        while True:
            there.send(child_channel.encode({"op": "in the way"}))
    fd = os.memfd_create("segment")
    os.ftruncate(fd, mmap.PAGESIZE)
    places = {"received": 0, "size": 100, "mark": 50, "most": 100}
    grant = {"op": "grant", "segment": ["s", mmap.PAGESIZE], **places}
    socket.send_fds(here, [child_channel.encode(grant)], [fd])
    await until(lambda: os.pread(fd, 10, 0) == b"x" * 10)
    # Longer than it is put off.
    await asyncio.sleep(0.1)
    assert await heard("wrote") == {"op": "wrote", "shard": 0, "end": 10, "due": False}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    here.close()
    os.close(fd)
