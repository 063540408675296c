"""What streams accept, skip, refuse and leave behind."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.unit.server.world import (
    Shard,
    World,
    begin,
    chunk,
    make_shard,
    sending,
    simple,
    world,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push import pipeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

CODE = grpc.StatusCode
Message = pb.PushWeightsRequest


async def opened(here: World, **fields: Any) -> str:
    return (await here.pushes.begin(begin(**fields), 1)).push_id


async def refused(here: World, push: str, messages: Iterable[Message]) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await here.join(push, messages)
    return caught.value


def state(here: World, push: str) -> pb.GetPushResponse:
    return here.pushes.get(pb.GetPushRequest(push_id=push))


def _received(here: World, push: str) -> int:
    return sum(shard.received_bytes for shard in state(here, push).shards)


def lay(of: Shard, **changes: Any) -> Message:
    """Return the shard's layout as one message with some fields changed."""
    (message,) = of.layout()
    for name, value in changes.items():
        setattr(message.layout, name, value)
    return message


async def test_bytes_sent_again_are_skipped_and_a_gap_tells_the_offset(here: World) -> None:
    push = await opened(here)
    shard = simple()[0]
    await here.join(push, [*shard.layout(), *shard.chunks(500)[:2]])
    overlap = await here.join(push, [chunk(0, 900, shard.data[900:1200])])
    assert overlap.received_bytes == 200
    again = await here.join(push, [chunk(0, 0, shard.data[:1000])])
    assert again.received_bytes == 0
    # What comes again is skipped, not written over bytes that were checked.
    await here.join(push, [chunk(0, 0, b"\xff" * 1000)])
    error = await refused(here, push, [chunk(0, 1201, b"x")])
    assert error.reason is Reason.OFFSET_MISMATCH
    assert error.code is CODE.ABORTED
    assert error.metadata == {"shard": "0", "received_bytes": "1200"}
    assert state(here, push).shards[0].received_bytes == 1200
    await here.join(push, [*shard.chunks(start=1200), *shard.given()])
    await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert here.read(1) == [shard.data]
    assert here.meters.received == len(shard.data)


async def test_a_shard_belongs_to_one_stream(here: World) -> None:
    push = await opened(here)
    shard = simple()[0]
    hold, sent = asyncio.Event(), asyncio.Event()

    async def first() -> AsyncIterator[Message]:
        yield Message(join=pb.JoinPush(push_id=push))
        for message in [*shard.layout(), chunk(0, 0, shard.data[:700])]:
            yield message
        sent.set()
        await hold.wait()

    owner = asyncio.create_task(here.pushes.stream(first()))
    await sent.wait()
    async with asyncio.timeout(5):
        # With an ingest process between, what was sent is not here at once; there is no event.
        while _received(here, push) < 700:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    error = await refused(here, push, [chunk(0, 700, shard.data[700:])])
    assert error.reason is Reason.SHARD_BUSY
    assert error.code is CODE.ABORTED
    assert error.metadata["received_bytes"] == "700"
    assert here.pushes.status()[0].streams == 1
    hold.set()
    await owner
    await here.join(push, [chunk(0, 700, shard.data[700:])])
    await here.pushes.commit(pb.CommitPushRequest(push_id=push))


async def test_a_cancelled_stream_leaves_the_push_open(here: World) -> None:
    push = await opened(here)
    shard = simple()[0]
    half = asyncio.Event()

    async def cut() -> AsyncIterator[Message]:
        yield Message(join=pb.JoinPush(push_id=push))
        for message in [*shard.layout(1)[:1]]:
            yield message
        half.set()
        await asyncio.Event().wait()

    stream = asyncio.create_task(here.pushes.stream(cut()))
    await half.wait()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    # The layout that was cut is sent again from its first part.
    await here.join(push, [*shard.layout(1), *shard.layout(1), *shard.chunks()])
    assert (await here.pushes.commit(pb.CommitPushRequest(push_id=push))).version == 1


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "no message"),
        ([chunk(0, 0, b"x")], "begin or join"),
        ([Message()], "begin or join"),
        ([Message(commit=pb.CommitPushRequest())], "begin or join"),
    ],
)
async def test_the_first_message(here: World, messages: list[Message], word: str) -> None:
    with pytest.raises(WeightSyncError, match=word) as caught:
        await here.pushes.stream(sending(messages))
    assert caught.value.reason is Reason.REQUEST_INVALID


async def test_an_unknown_push(here: World) -> None:
    error = await refused(here, "nonsense", [])
    assert error.reason is Reason.PUSH_UNKNOWN
    assert error.code is CODE.NOT_FOUND


S = simple()[0]


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([chunk(0, 0, b"x")], "layout"),
        ([*S.given()], "layout"),
        ([*S.layout(), chunk(0, 0, b"x" * ((2 << 20) + 1))], "2097152"),
        ([*S.layout(), chunk(0, 0, S.data + b"x")], "whose layout declares"),
        ([Message(begin=begin())], "first message"),
        ([Message()], "empty message"),
        ([*S.layout(), Message(digests=pb.ShardDigests(first=1, digests=b"x" * 32))], "digests"),
        ([*S.layout(), Message(digests=pb.ShardDigests(digests=b"x" * 17))], "digests"),
        ([lay(S, shard=2)], "at most 2 shards"),
        ([lay(S, shard_name="n" * 256)], "shard_name"),
        ([*S.layout(), lay(S, header_bytes=9)], "a different layout"),
        ([Message(commit=pb.CommitPushRequest(push_id="other"))], "a different push"),
        ([Message(commit=pb.CommitPushRequest(content_digest="md5:0"))], "content_digest"),
    ],
)
async def test_wrong_messages_end_the_stream_not_the_push(
    here: World, messages: list[Message], word: str
) -> None:
    push = await opened(here, shard_count=2)
    error = await refused(here, push, messages)
    assert error.reason is Reason.REQUEST_INVALID
    assert word in error.message
    shards = simple()
    await here.join(push, [m for shard in shards for m in shard.all()])
    assert (await here.pushes.commit(pb.CommitPushRequest(push_id=push))).version == 1
    assert here.read(1) == [shard.data for shard in shards]


def spec(name: str, begin: int, end: int, shape: tuple[int, ...] = (4,), dtype: str = "U8") -> Any:
    return pb.TensorSpec(name=name, dtype=dtype, shape=shape, begin=begin, end=end)


def described(*specs: Any, data: int = 4, header: int = 100) -> list[Message]:
    part = pb.LayoutPart(
        size_bytes=8 + header + data, header_bytes=header, tensors=specs, last=True
    )
    return [Message(layout=part)]


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        (described(spec("t", 0, 3)), '"t"'),
        (described(spec("t", 0, 4), spec("u", 3, 7), data=7), '"u"'),
        (described(spec("t", 0, 4), spec("u", 5, 9), data=9), "gap"),
        (described(spec("t", 0, 4), data=5), "fill 4 bytes"),
        (described(spec("t", 0, 4, dtype="Q4")), "Q4"),
        (described(spec("t", 0, 4, shape=(1,) * 33)), "dimensions"),
        (described(spec("t", 0, 0, shape=(1 << 63, 1 << 63)), data=0), '"t"'),
        (described(spec("../../etc", 0, 4), spec("../../etc", 4, 8), data=8), "twice"),
        (described(spec("a\nb", 0, 4)), "rename"),
        (described(spec("", 0, 4)), "1024"),
        (described(spec("t", 0, 4), header=(8 << 20) + 1), "header"),
        (described(spec("t", 0, 4), header=1), "header"),
        ([lay(S, last=False), lay(S, size_bytes=9)], "differ"),
        ([*S.layout(), lay(S, shard=1)], "twice"),
        ([*described(spec("t", 0, 1 << 40, (1 << 40,)), data=1 << 40)], "total_bytes"),
    ],
)
async def test_a_malformed_layout_ends_the_push(
    here: World, messages: list[Message], word: str
) -> None:
    push = await opened(here, total_bytes=100_000)
    error = await refused(here, push, messages)
    assert error.reason is Reason.LAYOUT_INVALID
    assert error.code is CODE.INVALID_ARGUMENT
    assert word in error.message
    assert_nothing_left(here, push)


def assert_nothing_left(here: World, push: str) -> None:
    assert state(here, push).durability == pb.DURABILITY_FAILED
    assert here.model.table.list() == []
    assert here.pushes.status() == []
    assert [slot.state for slot in here.model.slots.status()] == ["free", "free"]
    store = here.model.store.url.removeprefix("file://")
    assert not [path for path in _files(store) if "safetensors" in path]


def _files(folder: str) -> list[str]:
    return [str(path) for path in Path(folder).rglob("*") if path.is_file()]


def with_header(header: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


_GOOD = S.data[8 : 8 + S.header_size]
_DUPLICATE = _GOOD.replace(b"s0.b", b"s0.a")
_SPACE = b" " + _GOOD.rstrip() + b" " * (len(_GOOD) - 1 - len(_GOOD.rstrip()))
_PICKLE = b"\x80\x04c__builtin__\neval\n".ljust(len(_GOOD), b".")


@pytest.mark.parametrize(
    "front",
    [
        with_header(_GOOD, length=len(_GOOD) + 1),
        with_header(_GOOD, length=(1 << 64) - 1),
        with_header(_GOOD.replace(b"BF16", b"F16 ").replace(b'"F16 "', b'"F16" ')),
        with_header(_GOOD.replace(b"s0.a", b"s0.c")),
        with_header(_DUPLICATE),
        with_header(_SPACE),
        with_header(_PICKLE),
        with_header(b"[" * len(_GOOD)),
    ],
    ids=["length", "huge", "dtype", "name", "duplicate", "space", "pickle", "deep"],
)
@pytest.mark.parametrize("size", [50, 1 << 20])
async def test_a_header_that_is_not_the_layout_ends_the_push(
    here: World, front: bytes, size: int
) -> None:
    push = await opened(here)
    shard = make_shard(0, [("x", "U8", (0,), b"")])
    shard.__dict__.update(S.__dict__)
    shard.data = front + S.data[len(front) :]
    assert len(shard.data) == len(S.data)
    error = await refused(here, push, [*shard.layout(), *shard.chunks(size)])
    assert error.reason is Reason.SHARD_INVALID
    assert error.code is CODE.INVALID_ARGUMENT
    assert_nothing_left(here, push)
    # The body of the shard was not waited for.
    if size == 50:
        assert here.meters.received < len(front) + 50


async def test_too_many_tensors(tmp_path: Path) -> None:
    shard = make_shard(0, [(f"t{i}", "U8", (0,), b"") for i in range(11)])
    async with world(tmp_path, limits={"max_tensors": 10}) as here:
        push = await opened(here)
        error = await refused(here, push, shard.layout(4))
        assert error.reason is Reason.LAYOUT_INVALID
        assert "10 tensors" in error.message


async def test_a_layout_message_over_a_mebibyte(here: World) -> None:
    push = await opened(here)
    shard = make_shard(0, [(f"t{i}".ljust(1000, "x"), "U8", (0,), b"") for i in range(1100)])
    error = await refused(here, push, shard.layout())
    assert error.reason is Reason.REQUEST_INVALID
    assert "1048576" in error.message
    await here.join(push, [*shard.layout(500), *shard.chunks()])
    await here.pushes.commit(pb.CommitPushRequest(push_id=push))


async def test_streams_are_counted(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_streams": 1}) as here:
        push = await opened(here)
        hold, there = asyncio.Event(), asyncio.Event()

        async def waits() -> AsyncIterator[Message]:
            yield Message(join=pb.JoinPush(push_id=push))
            there.set()
            await hold.wait()

        stream = asyncio.create_task(here.pushes.stream(waits()))
        await there.wait()
        error = await refused(here, push, [])
        assert error.reason is Reason.LIMIT_EXCEEDED
        hold.set()
        await stream
        await here.join(push, [])


async def test_a_silent_stream_is_ended_and_the_push_stays(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"stream_idle_timeout_s": 1.5}) as here:
        push = await opened(here)

        async def silent() -> AsyncIterator[Message]:
            yield Message(join=pb.JoinPush(push_id=push))
            for message in simple()[0].all(700):
                await asyncio.sleep(0.1)
                yield message
            await asyncio.Event().wait()

        with pytest.raises(WeightSyncError) as caught:
            await here.pushes.stream(silent())
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        progress = state(here, push).shards[0]
        assert progress.received_bytes == progress.size_bytes
        await here.pushes.commit(pb.CommitPushRequest(push_id=push))


async def test_heartbeats_keep_a_stream_that_has_nothing_to_send(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"stream_idle_timeout_s": 1.5}) as here:
        push = await opened(here)
        shard = simple()[0]

        async def gathers() -> AsyncIterator[Message]:
            yield Message(join=pb.JoinPush(push_id=push))
            for _ in range(5):
                await asyncio.sleep(0.4)
                yield Message(heartbeat=pb.Heartbeat())
            for message in shard.all():
                yield message

        await here.pushes.stream(gathers())
        progress = state(here, push).shards[0]
        assert progress.received_bytes == progress.size_bytes


async def test_a_stream_is_not_silent_while_the_server_makes_it_wait(tmp_path: Path) -> None:
    async with world(tmp_path, slots=2, limits={"stream_idle_timeout_s": 1.5}) as here:
        holding = [await opened(here), await opened(here)]

        async def waits() -> AsyncIterator[Message]:
            yield Message(begin=begin(shard_count=1))
            for message in simple(shards=1)[0].all():
                yield message

        stream = asyncio.create_task(here.pushes.stream(waits()))
        await asyncio.sleep(2)
        assert not stream.done()
        await here.pushes.abort(pb.AbortPushRequest(push_id=holding[0]))
        assert (await stream).received_bytes


async def test_an_idle_push_is_dropped(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"resume_timeout_s": 1.5}) as here:
        push = await opened(here)
        shard = simple()[0]
        await here.join(push, [*shard.layout(), *shard.chunks(100)[:3]])
        for _ in range(6):
            # A message puts it off.
            await asyncio.sleep(0.3)
            assert state(here, push).durability == pb.DURABILITY_RECEIVING
        hold = asyncio.Event()

        async def connected() -> AsyncIterator[Message]:
            yield Message(join=pb.JoinPush(push_id=push))
            await hold.wait()

        stream = asyncio.create_task(here.pushes.stream(connected()))
        await asyncio.sleep(2)
        assert here.pushes.status()
        hold.set()
        await stream
        for _ in range(100):
            if not here.pushes.status():
                break
            await asyncio.sleep(0.05)
        assert here.pushes.status() == []
        assert "idle" in state(here, push).error
        assert_nothing_left(here, push)
        assert here.meters.pushes == {"aborted": 1}


async def test_memory_that_is_not_there(tmp_path: Path) -> None:
    async with world(tmp_path, memory=8 << 20) as here:
        push = await opened(here)
        shard = make_shard(0, [("t", "U8", (9 << 20,), bytes(9 << 20))])
        error = await refused(here, push, [*shard.layout(), *shard.chunks()])
        assert error.reason is Reason.MEMORY_EXHAUSTED
        assert error.code is CODE.RESOURCE_EXHAUSTED
        assert str(8 << 20) in error.message
        assert_nothing_left(here, push)
        assert here.budget.reserved == 0


async def test_a_header_that_no_stream_came_to_is_checked_before_the_commit(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = await opened(here)
    shard = make_shard(0, [("x", "U8", (0,), b"")])
    shard.__dict__.update(S.__dict__)
    shard.data = with_header(_GOOD.replace(b"s0.a", b"s0.c")) + S.data[8 + len(_GOOD) :]

    async def cut(*_: object) -> None:
        raise asyncio.CancelledError

    await here.join(push, shard.layout())
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "check_arrived_header", cut)
        with pytest.raises(asyncio.CancelledError):
            await here.join(push, shard.chunks())
    assert state(here, push).shards[0].received_bytes == len(shard.data)
    with pytest.raises(WeightSyncError) as caught:
        await here.pushes.commit(pb.CommitPushRequest(push_id=push))
    assert caught.value.reason is Reason.SHARD_INVALID
    assert_nothing_left(here, push)
