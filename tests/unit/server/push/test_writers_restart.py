"""A push by several writers outlives the server: shards that were whole stay, others come again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.deltas.pushing import until
from tests.unit.server.push.boxes import Held, Writer, push_all, sharded, version
from tests.unit.server.world import Shard, World, content, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

COUNT = 4


def life(folder: Path, **more: Any) -> AbstractAsyncContextManager[World]:
    """Return one life of the server; leaving it keeps what a crash keeps."""
    return world(folder, limits={"writer_timeout_s": 1.5} | more.pop("limits", {}), **more)


async def half(here: World, writers: Sequence[Writer]) -> None:
    """Have all writers bring shard 0, and all but the last one shard 1; shard 2 is begun."""
    for writer in writers:
        await writer.begin(here)
    for writer in writers:
        first, second, third = writer.held
        last = writer is writers[-1]
        messages = [*first.all(), *([] if last else second.all())]
        messages += [*third.shard.layout(), third.boxes(), *list(third.chunks())[:1]]
        await writer.stream(here, messages)
    push = here.pushes.find(writers[0].push_id)
    await until(lambda: push.state.shards[0].verified)
    assert push.state.shards[0].durable_bytes == push.state.shards[0].entry.size


async def cut(folder: Path, shards: list[Shard], count: int = COUNT) -> list[Writer]:
    """Return the writers of a push in the midst of which the server ended."""
    writers = sharded(shards, count)
    async with life(folder) as here:
        await half(here, writers)
    return writers


async def go_on(here: World, writer: Writer) -> pb.CommitPushResponse:
    """Do what a client does that was cut: ask, declare, send what is not there, and digests."""
    asked = pb.GetPushRequest(push_id=writer.push_id, writer=writer.number)
    there = {progress.shard: progress.received_bytes for progress in here.pushes.get(asked).shards}
    assert (await here.pushes.begin(writer.request(), None)).push_id == writer.push_id
    messages: list[pb.PushWeightsRequest] = []
    for held in writer.held:
        at = there.get(held.shard.index, 0)
        messages += [*held.shard.layout(), held.boxes(), *held.chunks(at), held.digests()]
    await writer.stream(here, messages)
    return await writer.commit(here)


async def all_go_on(here: World, writers: Sequence[Writer]) -> list[Any]:
    return await asyncio.gather(*(go_on(here, w) for w in writers), return_exceptions=True)


def sent(here: World) -> int:
    return here.meters.received


def box_bytes(writers: Sequence[Writer], shards: Sequence[int]) -> int:
    each = (held for writer in writers for held in writer.held if held.shard.index in shards)
    return sum(len(part.data) for held in each for part in held.sent)


@pytest.fixture(name="shards")
def _shards() -> list[Shard]:
    return version(shards=3)


async def test_whole_shards_are_not_sent_again(tmp_path: Path, shards: list[Shard]) -> None:
    writers = await cut(tmp_path, shards)
    async with life(tmp_path) as here:
        # It waits for its writers, and holds no memory meanwhile.
        (waiting,) = here.pushes.status()
        assert waiting.received_bytes == len(shards[0].data)
        assert all(slot.state == "free" for slot in here.model.slots.status())
        answers = await all_go_on(here, writers)
        assert {answer.content_digest for answer in answers} == {content(shards)}, answers
        assert here.read(1) == [shard.data for shard in shards]
        assert sent(here) == box_bytes(writers, [1, 2])
        assert here.model.table.get(1).commit.trainer_verified  # type: ignore[union-attr]


async def test_a_stream_alone_takes_it_up(tmp_path: Path, shards: list[Shard]) -> None:
    writers = await cut(tmp_path, shards)
    async with life(tmp_path) as here:
        for writer in writers:
            push = here.pushes.get(pb.GetPushRequest(push_id=writer.push_id, writer=writer.number))
            kept = {p.shard: (p.received_bytes, p.size_bytes) for p in push.shards}
            if writer is writers[0]:
                assert kept == {0: (len(shards[0].data),) * 2}
            await writer.stream(here)
        assert not here.pushes.status()[0].absent_writers
        answers = await asyncio.gather(*(writer.commit(here) for writer in writers))
        assert {answer.content_digest for answer in answers} == {content(shards)}


async def test_one_that_does_not_come_back_ends_it_for_all(
    tmp_path: Path, shards: list[Shard]
) -> None:
    writers = await cut(tmp_path, shards)
    async with life(tmp_path) as here:
        answers = await all_go_on(here, writers[:-1])
        for answer in answers:
            assert isinstance(answer, WeightSyncError), answers
            assert answer.reason is Reason.PUSH_ABORTED
            assert "writer 3 of 4 did not arrive for 1.5 s" in answer.message
        # The one that comes late is told once, and the step begins anew.
        with pytest.raises(WeightSyncError, match="writer 3 of 4 did not arrive"):
            await writers[-1].begin(here)
        assert list((tmp_path / "store").rglob("*.safetensors*")) == []
        answers = await push_all(here, writers)
        assert {answer.content_digest for answer in answers} == {content(shards)}


async def test_one_that_comes_back_with_other_bytes_is_named(
    tmp_path: Path, shards: list[Shard]
) -> None:
    writers = await cut(tmp_path, shards)
    # The shard that was kept is the one in which it has others.
    writers[2].held[0] = sharded(version(1, shards=3), COUNT)[2].held[0]
    async with life(tmp_path) as here:
        for answer in await all_go_on(here, writers):
            assert isinstance(answer, WeightSyncError), answer
            assert answer.reason is Reason.DIGEST_MISMATCH
            assert answer.metadata["writer"] == "2"
        await until(lambda: here.model.table.list() == [])


async def test_one_that_shards_otherwise_now_proves_what_was_kept(
    tmp_path: Path, shards: list[Shard]
) -> None:
    writers = await cut(tmp_path, shards)
    again = sharded(shards, COUNT, along=1)
    for one, before in zip(again, writers, strict=True):
        one.push_id = before.push_id
    async with life(tmp_path) as here:
        answers = await all_go_on(here, again)
        assert {answer.content_digest for answer in answers} == {content(shards)}


async def test_what_was_damaged_on_the_disk_comes_again(
    tmp_path: Path, shards: list[Shard]
) -> None:
    writers = await cut(tmp_path, shards)
    (kept,) = [
        path for path in (tmp_path / "store").rglob("*") if path.is_file() and _is_shard(path)
    ]
    data = bytearray(kept.read_bytes())
    data[-3] ^= 1
    kept.write_bytes(data)
    async with life(tmp_path) as here:
        # It believes the reply, and hears at its commit that not all of it is there.
        with pytest.raises(WeightSyncError) as caught:
            await go_on(here, writers[0])
        assert caught.value.reason is Reason.PUSH_INCOMPLETE
        answers = await all_go_on(here, writers)
        assert {answer.content_digest for answer in answers} == {content(shards)}


def _is_shard(path: Path) -> bool:
    return b'"s0.t0"' in path.read_bytes()[:100]


async def test_a_restart_forgets_no_version_and_an_older_epoch_ends_it(
    tmp_path: Path, shards: list[Shard]
) -> None:
    writers = sharded(shards, COUNT)
    async with life(tmp_path) as here:
        await half(here, writers)
        await here.model.epochs.acquire("next")
    async with life(tmp_path) as here:
        assert here.pushes.status() == []
        answers = await push_all(here, writers)
        assert {answer.version for answer in answers} == {1}


async def test_it_never_sleeps_while_the_server_lives(tmp_path: Path) -> None:
    shards = version(shards=3)
    writers = sharded(shards, COUNT)
    limits = {"writer_timeout_s": 30, "resume_timeout_s": 1.0}
    async with life(tmp_path, limits=limits) as here:
        await half(here, writers)
        push = here.pushes.find(writers[0].push_id)
        await asyncio.sleep(4 * here.pushes.limits.sleep_after_s)
        assert push.state.suspended is None
        answers = await all_go_on(here, writers)
        assert {answer.content_digest for answer in answers} == {content(shards)}


async def test_with_a_store_in_memory_nothing_is_kept(tmp_path: Path) -> None:
    writers = sharded(version(shards=3), COUNT)
    async with life(tmp_path, store="memory://") as here:
        await writers[0].begin(here)
        assert not here.pushes.find(writers[0].push_id).state.recorded


async def test_changes_go_whole_after_a_restart(tmp_path: Path, shards: list[Shard]) -> None:
    writers = sharded(shards, 2)
    async with life(tmp_path, limits={"writer_timeout_s": 30}) as here:
        await here.push(version(1, shards=3), 1)
        for writer in writers:
            await writer.begin(here)
    async with life(tmp_path, limits={"writer_timeout_s": 30}) as here:
        first: Held = writers[0].held[0]
        boxes = first.boxes()
        boxes.boxes.patch_bytes = 500
        # The server knows no more which base it named.
        with pytest.raises(WeightSyncError, match="restarted since writer 0 named it") as caught:
            await writers[0].stream(here, [*first.shard.layout(), boxes])
        assert caught.value.reason is Reason.BASE_MISMATCH
        answers = await asyncio.gather(*(go_on(here, writer) for writer in writers))
        assert {answer.content_digest for answer in answers} == {content(shards)}


@pytest.mark.parametrize("patch_bytes", [1, 450, 4000])
async def test_what_was_kept_is_declared_as_changes_and_then_whole(
    tmp_path: Path, shards: list[Shard], patch_bytes: int
) -> None:
    writers = sharded(shards, 2)
    limits = {"writer_timeout_s": 30}
    async with life(tmp_path, limits=limits) as here:
        await here.push(version(1, shards=3), 1)
        await half(here, writers)
    async with life(tmp_path, limits=limits) as here:
        first = writers[0]
        kept, lost = first.held[:2]
        changes = [kept.boxes(), lost.boxes()]
        for boxes in changes:
            boxes.boxes.patch_bytes = patch_bytes
        # A stream that the restart cut goes on as it was; of what was kept nothing is to come.
        begun = [*kept.shard.layout(), changes[0], kept.digests()]
        with pytest.raises(WeightSyncError) as caught:
            await first.stream(here, [*begun, *lost.shard.layout(), changes[1]])
        assert caught.value.reason is Reason.BASE_MISMATCH
        asked = pb.GetPushRequest(push_id=first.push_id, writer=0)
        (progress,) = here.pushes.get(asked).shards
        assert progress.received_bytes == progress.size_bytes >= patch_bytes
        await first.stream(here, begun)
        answers = await asyncio.gather(*(go_on(here, writer) for writer in writers))
        assert {answer.content_digest for answer in answers} == {content(shards)}
        assert here.read(2) == [shard.data for shard in shards]


async def test_other_boxes_of_what_was_kept_are_refused(
    tmp_path: Path, shards: list[Shard]
) -> None:
    writers = await cut(tmp_path, shards, 2)
    other = sharded(shards, 2, along=1)[0].held[0]
    async with life(tmp_path) as here:
        await go_on_with(here, writers[0], writers[0].held[0])
        with pytest.raises(WeightSyncError, match="writer 0 declared other boxes"):
            await go_on_with(here, writers[0], other)


async def go_on_with(here: World, writer: Writer, held: Held) -> None:
    await writer.stream(here, [*held.shard.layout(), held.boxes()])


async def test_while_the_server_reads_back_no_writer_is_late(
    tmp_path: Path, shards: list[Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = await cut(tmp_path, shards)
    async with life(tmp_path) as here:
        restore = here.model.fetch.restore

        async def slow(*args: Any) -> int:
            # Longer than a writer may bring nothing.
            await asyncio.sleep(2)
            return await restore(*args)

        monkeypatch.setattr(here.model.fetch, "restore", slow)
        answers = await all_go_on(here, writers)
        assert {answer.content_digest for answer in answers} == {content(shards)}, answers
