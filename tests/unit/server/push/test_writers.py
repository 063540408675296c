"""Several writers bring one version: exactly once each element, or nothing and each is told why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.deltas.pushing import until
from tests.unit.server.push.boxes import Held, Writer, part, push_all, sharded, version
from tests.unit.server.world import World, content, make_shard, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.tensor_slices import Box
from weightsync.shm.same_host import PeerCredentials
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.sources.same_host import SameHostOffers
from weightsync_server.workers.fetch.gpu_copy import GpuFetchPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


@pytest.fixture(name="box_world")
async def _box_world(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, limits={"writer_timeout_s": 1.5}) as made:
        yield made


async def refusals(here: World, writers: Sequence[Writer]) -> list[WeightSyncError]:
    """Have all of them push; return what each is told, with nothing left of it."""
    results = await asyncio.gather(*(w.push(here) for w in writers), return_exceptions=True)
    errors = [result for result in results if isinstance(result, WeightSyncError)]
    assert len(errors) == len(writers), results
    # A stream is told at once, while others still work on the memory.
    await until(lambda: all(slot.state == "free" for slot in here.model.slots.status()))
    assert here.pushes.status() == []
    assert here.model.table.list() == []
    return errors


@pytest.mark.parametrize("along", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 4, 5])
async def test_a_version_is_the_same_however_it_is_cut(
    box_world: World, count: int, along: int
) -> None:
    shards = version()
    responses = await push_all(box_world, sharded(shards, count, along=along))
    assert {response.content_digest for response in responses} == {content(shards)}
    assert {response.version for response in responses} == {1}
    assert box_world.read(1) == [shard.data for shard in shards]
    assert box_world.model.table.get(1).commit.trainer_verified  # type: ignore[union-attr]


async def test_it_survives_in_the_store_and_can_be_pushed_again(
    box_world: World, tmp_path: Path
) -> None:
    shards = version()
    await push_all(box_world, sharded(shards, 3))
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert all(shard.data in stored for shard in shards)
    assert await box_world.push(shards) == 2
    responses = await push_all(box_world, sharded(version(1), 2, key="run/2"))
    assert {response.version for response in responses} == {3}


async def test_chunks_of_any_size_and_a_cut_are_taken_up(box_world: World) -> None:
    shards = version(shards=1)
    writers = sharded(shards, 2, along=1)
    for writer in writers:
        writer.held[0].chunk_bytes = 7
        await writer.begin(box_world)
    first, second = writers
    held = second.held[0]
    await first.stream(box_world)
    chunks = list(held.chunks())
    await second.stream(box_world, [*held.shard.layout(), held.boxes(), *chunks[:5]])
    response = await second.begin(box_world)
    (progress,) = response.shards
    assert progress.received_bytes == 35
    assert progress.size_bytes == sum(len(part.data) for part in held.sent)
    rest = [held.boxes(), *held.chunks(start=35), held.digests()]
    await second.stream(box_world, rest)
    answers = await asyncio.gather(first.commit(box_world), second.commit(box_world))
    assert [answer.content_digest for answer in answers] == [content(shards)] * 2


async def test_replicas_are_compared(box_world: World) -> None:
    shards = version(shards=1)
    writers = sharded(shards, 2)
    number = shards[0].entries.index(next(e for e in shards[0].entries if not e.shape))
    replica = next(p for p in writers[1].held[0].replicas if p.tensor == number)
    replica.data = bytes(len(replica.data))
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.DIGEST_MISMATCH
        assert "writers 0 and 1" in error.message
        assert shards[0].entries[number].name in error.message
        assert error.metadata["writer"] == "1"


async def test_a_replica_that_nobody_sends_is_refused(box_world: World) -> None:
    writers = sharded(version(shards=1), 2)
    held = writers[1].held[0]
    held.replicas.append(held.sent[0])
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.LAYOUT_INVALID
        assert "which no lower writer sends" in error.message


async def test_a_hole_is_refused(box_world: World) -> None:
    writers = sharded(version(shards=1), 3)
    del writers[2].held[0].sent[0]
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.LAYOUT_INVALID
        assert "writers 0, 1 send" in error.message
        assert "are in none" in error.message


async def test_an_overlap_is_refused(box_world: World) -> None:
    shards = version(shards=1)
    writers = sharded(shards, 2)
    at = next(at for at, entry in enumerate(shards[0].entries) if entry.shape == (12, 8))
    mine = next(index for index, p in enumerate(writers[1].held[0].sent) if p.tensor == at)
    writers[1].held[0].sent[mine] = part(shards[0], at, Box((5, 0), (7, 8)))
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.LAYOUT_INVALID
        assert "[0:6, 0:8] and [5:12, 0:8] overlap" in error.message


async def test_two_that_send_the_same_are_compared(box_world: World) -> None:
    shards = version(shards=1)
    writers = sharded(shards, 2)
    held = writers[1].held[0]
    held.sent += held.replicas
    held.replicas.clear()
    responses = await push_all(box_world, writers)
    assert {response.content_digest for response in responses} == {content(shards)}
    writers = sharded(shards, 2, key="run/2")
    held = writers[1].held[0]
    held.sent += held.replicas
    held.replicas.clear()
    held.sent[-1].data = bytes(len(held.sent[-1].data))
    for error in await asyncio.gather(
        *(writer.push(box_world) for writer in writers), return_exceptions=True
    ):
        assert isinstance(error, WeightSyncError)
        assert "writers 0 and 1 declared the same part" in error.message


async def test_one_that_sends_a_box_twice_is_refused(box_world: World) -> None:
    writers = sharded(version(shards=1), 2)
    writers[1].held[0].sent.append(writers[1].held[0].sent[0])
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.LAYOUT_INVALID
        assert "writer 1 sends" in error.message
        assert "twice" in error.message


async def test_bytes_that_are_not_what_the_writer_computed_are_refused(box_world: World) -> None:
    writers = sharded(version(shards=1), 2, along=1)
    held = writers[1].held[0]
    digests = held.digests()
    held.sent[0].data = bytes(len(held.sent[0].data))
    held.digests = lambda: digests  # type: ignore[method-assign]
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.DIGEST_MISMATCH
        assert "from writer 1" in error.message


async def test_a_writer_with_another_shape_is_named(box_world: World) -> None:
    writers = sharded(version(shards=1), 2)
    other = version(shards=1)[0]
    entries = list(other.entries)
    at = next(at for at, entry in enumerate(entries) if entry.shape == (12, 8))
    entries[at] = replace(entries[at], shape=(8, 12))
    other.entries = tuple(entries)
    writers[1].held = [Held(other)]
    for error in await refusals(box_world, writers):
        assert error.reason is Reason.LAYOUT_INVALID
        assert "writer" in error.metadata
        assert "[8, 12]" in error.message
        assert "[12, 8]" in error.message


async def test_a_writer_of_another_size_is_named(box_world: World) -> None:
    first, second = sharded(version(shards=1), 2)
    await first.begin(box_world)
    with pytest.raises(
        WeightSyncError, match="writer 1 declares 5 as total_bytes, but writer 0"
    ) as caught:
        await second.begin(box_world, total_bytes=5)
    assert caught.value.reason is Reason.LAYOUT_INVALID
    with pytest.raises(WeightSyncError, match="writer 1 declares 5"):
        await first.stream(box_world)
    assert box_world.pushes.status() == []


async def test_one_that_never_comes_ends_it_for_all_and_is_told_when_it_comes(
    box_world: World,
) -> None:
    writers = sharded(version(shards=1), 3)
    for error in await refusals(box_world, writers[:2]):
        assert error.reason is Reason.PUSH_ABORTED
        assert "writer 2 of 3 did not arrive for 1.5 s" in error.message
    with pytest.raises(WeightSyncError, match="writer 2 of 3 did not arrive"):
        await writers[2].push(box_world)
    # Told once: the next try of all of them is another push.
    responses = await push_all(box_world, writers)
    assert {response.version for response in responses} == {1}


async def test_a_later_job_with_the_same_key_begins_anew(box_world: World) -> None:
    writers = sharded(version(shards=1), 3)
    await refusals(box_world, writers[:2])
    # Whoever has not come by now is gone; this is another process with its number.
    await asyncio.sleep(box_world.pushes.limits.writer_timeout_s * 1.2)
    responses = await push_all(box_world, [writers[2], *writers[:2]])
    assert {response.version for response in responses} == {1}


async def test_one_that_stands_still_ends_it_for_all(box_world: World) -> None:
    first, second = sharded(version(shards=1), 2)
    pushing = asyncio.create_task(first.push(box_world))
    await second.begin(box_world)
    held = second.held[0]
    await second.stream(box_world, [*held.shard.layout(), held.boxes()])
    with pytest.raises(WeightSyncError, match=r"writer 1 of 2 brought nothing more for 1\.5 s"):
        await pushing
    assert all(slot.state == "free" for slot in box_world.model.slots.status())


async def test_one_that_is_slow_is_waited_for(box_world: World) -> None:
    first, second = sharded(version(shards=1), 2)
    pushing = asyncio.create_task(first.push(box_world))
    await second.begin(box_world)
    held = second.held[0]
    held.chunk_bytes = 40
    messages = [*held.shard.layout(), held.boxes(), *held.chunks(), held.digests()]
    for at in range(0, len(messages), 2):
        await asyncio.sleep(0.5)
        await second.stream(box_world, messages[at : at + 2])
    assert await second.commit(box_world) == await pushing


async def test_one_that_gives_up_says_why_to_the_others(box_world: World) -> None:
    first, second = sharded(version(shards=1), 2)
    pushing = asyncio.create_task(first.push(box_world))
    await second.begin(box_world)
    await asyncio.sleep(0.05)
    request = pb.AbortPushRequest(push_id=second.push_id, writer=1, reason="CUDA out of memory")
    await box_world.pushes.abort(request)
    with pytest.raises(WeightSyncError, match="writer 1 gave the push up for all: CUDA out of"):
        await pushing


async def test_a_commit_without_all_of_it_says_what_lacks(box_world: World) -> None:
    first, second = sharded(version(shards=2), 2)
    await first.begin(box_world)
    await first.stream(box_world, list(first.held[0].all()))
    with pytest.raises(WeightSyncError, match="as of shard 1") as caught:
        await first.commit(box_world)
    assert caught.value.reason is Reason.PUSH_INCOMPLETE
    await first.stream(box_world, list(first.held[1].all()))
    first_answer, _ = await asyncio.gather(first.commit(box_world), second.push(box_world))
    assert first_answer.version == 1


async def test_other_boxes_under_the_same_number_are_refused(box_world: World) -> None:
    shards = version(shards=1)
    (first, _), (other, _) = sharded(shards, 2), sharded(shards, 2, along=1)
    await first.begin(box_world)
    await first.stream(box_world)
    await other.begin(box_world)
    with pytest.raises(WeightSyncError, match="writer 0 declared other boxes of shard 0 before"):
        await other.stream(box_world)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"writer": 2}, "number writers from 0"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"total_bytes": 0}, "total_bytes"),
        ({"shard_count": 0}, "shard_count"),
        ({"writers": 2000}, "at most 1024"),
        ({"kind": pb.PUSH_KIND_DELTA}, "base_content_digest"),
    ],
)
async def test_begins_that_cannot_be_are_refused(
    box_world: World, fields: dict[str, object], word: str
) -> None:
    writer, _ = sharded(version(shards=1), 2)
    with pytest.raises(WeightSyncError, match=word) as caught:
        await writer.begin(box_world, **fields)
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert box_world.pushes.status() == []


async def test_bytes_before_boxes_and_boxes_before_the_layout_are_refused(
    box_world: World,
) -> None:
    writer, _ = sharded(version(shards=1), 2)
    held = writer.held[0]
    await writer.begin(box_world)
    with pytest.raises(WeightSyncError, match="before the last part of its layout"):
        await writer.stream(box_world, [held.boxes()])
    with pytest.raises(WeightSyncError, match="the last part of writer 0's boxes before"):
        await writer.stream(box_world, [*held.shard.layout(), *held.chunks()])


@pytest.mark.parametrize(
    ("box", "word"),
    [
        (pb.Box(tensor=99, offsets=[0], sizes=[1]), "which has 5 tensors"),
        (pb.Box(tensor=0, offsets=[0], sizes=[1] * 9), "whose shape is"),
        (pb.Box(tensor=0, offsets=[1 << 63] * 3, sizes=[1 << 63] * 3), "whose shape is"),
    ],
)
async def test_boxes_outside_are_refused(box_world: World, box: pb.Box, word: str) -> None:
    writer, _ = sharded(version(shards=1), 2)
    await writer.begin(box_world)
    bad = pb.PushWeightsRequest(boxes=pb.BoxPart(shard=0, sent=[box], last=True))
    with pytest.raises(WeightSyncError, match=word):
        await writer.stream(box_world, [*writer.held[0].shard.layout(), bad])


async def test_boxes_in_a_push_of_one_are_refused(box_world: World) -> None:
    shards = simple()
    response = await box_world.pushes.begin(pb.BeginPushRequest(model="m"), None)
    boxes = pb.PushWeightsRequest(boxes=pb.BoxPart(shard=0, last=True))
    with pytest.raises(WeightSyncError, match="begin the push with writers"):
        await box_world.join(response.push_id, [*shards[0].layout(), boxes])


async def test_memory_is_lent_to_who_sends_of_it_alone(box_world: World, tmp_path: Path) -> None:
    offers = SameHostOffers(box_world.pushes, tmp_path / "t.sock", GpuFetchPool())
    shards = version(shards=1)
    first, second = sharded(shards, 2)
    nothing = second.held[0]
    for tensor in nothing.sent:
        first.held[0].sent.append(tensor)
    nothing.sent.clear()
    sessions = []
    for writer in (first, second):
        response = await writer.begin(box_world, same_host=pb.SameHostSource())
        await writer.stream(box_world, [*shards[0].layout(), writer.held[0].boxes()])
        offers.offer(response, "unix:", writer.number)
        session = offers.session(PeerCredentials(1, 2))
        await asyncio.to_thread(session.redeem, response.same_host_offer.secret)
        sessions.append(session)
    # It could write into what is proved by then.
    with pytest.raises(WeightSyncError, match="writer 1 sends no bytes of shard 0"):
        await asyncio.to_thread(sessions[1].lend, 0)
    lease = await asyncio.to_thread(sessions[0].lend, 0)
    try:
        digests = b"".join(tensor_digest(part.data) for part in first.held[0].sent)
        await second.stream(box_world, [nothing.digests()])
        await asyncio.to_thread(sessions[0].written, 0, digests)
        # Who says that all is written and can go on writing is not believed.
        committing = asyncio.gather(
            first.commit(box_world), second.commit(box_world), return_exceptions=True
        )
        for error in await committing:
            assert isinstance(error, WeightSyncError)
            assert error.reason is Reason.WRITER_LEFT
    finally:
        os.close(lease.fd)
        for session in sessions:
            session.close()


@pytest.mark.parametrize("mapped", [False, True])
async def test_the_writer_that_keeps_memory_open_is_named(
    box_world: World, tmp_path: Path, mapped: bool
) -> None:
    offers = SameHostOffers(box_world.pushes, tmp_path / "t.sock", GpuFetchPool())
    shards = version(shards=1)
    writers = sharded(shards, 2)
    sessions, keepers = [], []
    try:
        for writer in writers:
            response = await writer.begin(box_world, same_host=pb.SameHostSource())
            await writer.stream(box_world, [*shards[0].layout(), writer.held[0].boxes()])
            offers.offer(response, "unix:", writer.number)
            keepers.append(Keeper(mapped=mapped))
            session = offers.session(PeerCredentials(keepers[-1].pid, os.getuid()))
            await asyncio.to_thread(session.redeem, response.same_host_offer.secret)
            sessions.append(session)
            lease = await asyncio.to_thread(session.lend, 0)
            keepers[-1].take(lease.fd)
            os.close(lease.fd)
        keepers[0].end()
        for writer, session in zip(writers, sessions, strict=True):
            held = writer.held[0]
            digests = b"".join(tensor_digest(part.data) for part in held.sent + held.replicas)
            await asyncio.to_thread(session.written, 0, digests)
        committing = [writer.commit(box_world) for writer in writers]
        for error in await asyncio.gather(*committing, return_exceptions=True):
            assert isinstance(error, WeightSyncError)
            assert error.reason is Reason.WRITER_LEFT
            assert "but writer 1 still holds its memory open" in error.message
            assert error.metadata["writer"] == "1"
    finally:
        for keeper in keepers:
            keeper.end()
        for session in sessions:
            session.close()


class Keeper:
    """A process that keeps memory open, or mapped alone, until it is ended."""

    def __init__(self, *, mapped: bool) -> None:
        self._ours, theirs = socket.socketpair()
        program = (
            "import mmap, os, socket, sys\n"
            "there = socket.socket(fileno=int(sys.argv[1]))\n"
            "_, (fd,), _, _ = socket.recv_fds(there, 1, 1)\n"
            "if sys.argv[2] == 'True':\n"
            "    kept = mmap.mmap(fd, 4096)\n"
            "    os.close(fd)\n"
            "there.send(b'k')\n"
            "there.recv(1)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(mapped)],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.pid = self._process.pid

    def take(self, fd: int) -> None:
        socket.send_fds(self._ours, [b"f"], [fd])
        assert self._ours.recv(1) == b"k"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._ours.close()


async def test_two_processes_with_one_number_do_not_mix(box_world: World) -> None:
    writers = sharded(version(), 2, along=1)
    (_, stranger) = sharded(version(7), 2, along=1)
    first, second = writers
    for writer in (first, second, stranger):
        await writer.begin(box_world)
        for held in writer.held:
            held.replicas.clear()
    await first.stream(box_world)
    # Each brings another shard, and finds that of the other complete.
    await second.stream(box_world, list(second.held[0].all()))
    await stranger.stream(box_world, list(stranger.held[1].all()))
    await asyncio.sleep(0.1)
    late = stranger.held[0]
    with pytest.raises(WeightSyncError, match="two processes use this number") as caught:
        await stranger.stream(box_world, [late.boxes(), late.digests()])
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    for writer in writers:
        with pytest.raises(WeightSyncError, match="two processes use this number"):
            await writer.commit(box_world)
    assert box_world.model.table.list() == []


async def test_one_that_begins_again_and_again_brings_nothing(box_world: World) -> None:
    first, second = sharded(version(shards=1), 2)
    pushing = asyncio.create_task(first.push(box_world))
    while not pushing.done():
        with contextlib.suppress(WeightSyncError):
            await second.begin(box_world)
        await asyncio.sleep(0.05)
    with pytest.raises(WeightSyncError, match="writer 1 of 2 brought nothing more"):
        await pushing


async def test_more_boxes_than_there_may_be_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"max_boxes": 11}) as here:
        writer, _ = sharded(version(shards=1), 2)
        held = writer.held[0]
        await writer.begin(here)
        await writer.stream(here, [*held.shard.layout(), held.boxes()])
        # What comes again after a cut counts once.
        await writer.stream(here, [held.boxes()])
        many = pb.BoxPart(shard=0, sent=[pb.Box()] * 7)
        with pytest.raises(WeightSyncError, match="over 11 boxes"):
            await writer.stream(here, [pb.PushWeightsRequest(boxes=many)])


@pytest.mark.parametrize(
    ("box", "word"),
    [
        (Box((0, 0, 0), (0, 2, 1)), "an empty box"),
        (Box((0, 0, 0), (400_000, 2, 1)), "blocks of 4 bytes"),
    ],
)
async def test_boxes_that_would_take_for_ever_are_refused(
    box_world: World, box: Box, word: str
) -> None:
    shard = make_shard(0, [("x", "BF16", (400_000, 3, 2), bytes(4_800_000))])
    writer = Writer(0, 2, [Held(shard)])
    await writer.begin(box_world)
    wire = pb.Box(tensor=0, offsets=box.offsets, sizes=box.sizes)
    bad = pb.PushWeightsRequest(boxes=pb.BoxPart(shard=0, sent=[wire], last=True))
    with pytest.raises(WeightSyncError, match=word):
        await writer.stream(box_world, [*shard.layout(), bad])


async def test_status_tells_for_whom_a_push_waits(box_world: World) -> None:
    first, second, _ = sharded(version(shards=1), 3)
    await first.begin(box_world)
    await first.stream(box_world)
    committing = asyncio.create_task(first.commit(box_world))
    await second.begin(box_world)
    (push,) = box_world.pushes.status()
    assert (push.writers, list(push.absent_writers)) == (3, [2])
    assert 1 in push.unfinished_writers
    await until(lambda: list(box_world.pushes.status()[0].unfinished_writers) == [1])
    await box_world.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
    with pytest.raises(WeightSyncError):
        await committing
