"""Pushes that outlive the server: what is kept, what is told after a restart, what is removed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import names
from tests.unit.server.world import (
    Shard,
    Threads,
    World,
    begin,
    chunk,
    content,
    make_shard,
    world,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.store import checkpoint_index

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

CHUNK = 1000
#: Small steps, so that small shards have several.
LIMITS = {"keep_bytes": 4 * CHUNK, "loss_bytes": 8 * CHUNK}


def shards(seed: int = 0) -> list[Shard]:
    data = bytes((seed + i * i) % 251 for i in range(40 * CHUNK))
    return [
        make_shard(0, [("a", "U8", (len(data),), data)]),
        make_shard(1, [("b", "U8", (3 * CHUNK,), data[: 3 * CHUNK])]),
    ]


def life(folder: Path, **more: Any) -> AbstractAsyncContextManager[World]:
    """Return one life of the server; leaving it keeps what a crash keeps."""
    return world(folder, limits=LIMITS | more.pop("limits", {}), **more)


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)


async def half(here: World, sent: int = 22, **fields: Any) -> pb.BeginPushResponse:
    """Send all of shard 1 and some chunks of shard 0; return when the disk has caught up."""
    first, second = shards()
    begun = await here.pushes.begin(begin(shard_count=2, idempotency_key="k", **fields), None)
    await here.join(begun.push_id, second.all(CHUNK))
    await here.join(begun.push_id, [*first.layout(), *first.chunks(CHUNK)[:sent]])
    push = here.pushes.find(begun.push_id)

    def settled() -> bool:
        lag = push.state.shards[0].received - push.state.shards[0].durable_bytes
        return lag < LIMITS["keep_bytes"] and push.state.shards[1].verified

    await until(settled)
    return begun


async def interrupted(folder: Path) -> pb.BeginPushResponse:
    """Return a push in the midst of which the server ended."""
    async with life(folder) as here:
        return await half(here)


def received(shard_progress: list[pb.ShardProgress]) -> dict[int, int]:
    return {progress.shard: progress.received_bytes for progress in shard_progress}


async def finish(here: World, push_id: str, offset: int) -> pb.CommitPushResponse:
    first, second = shards()
    await here.join(push_id, [*first.chunks(CHUNK, offset), *first.given(), *second.given()])
    return await here.pushes.commit(
        pb.CommitPushRequest(push_id=push_id, content_digest=content(shards()))
    )


async def test_an_open_push_goes_on_after_a_restart(tmp_path: Path) -> None:
    begun = await interrupted(tmp_path)
    async with life(tmp_path) as here:
        told = here.pushes.get(pb.GetPushRequest(push_id=begun.push_id))
        again = await here.pushes.begin(begin(shard_count=2, idempotency_key="k"), None)
        assert (again.push_id, again.version) == (begun.push_id, begun.version)
        offsets = received(list(again.shards))
        assert offsets == received(list(told.shards))
        assert 22 * CHUNK - LIMITS["keep_bytes"] < offsets[0] <= 22 * CHUNK
        assert offsets[1] == len(shards()[1].data)
        response = await finish(here, begun.push_id, offsets[0])
        assert not response.already
        assert here.read(1) == [shard.data for shard in shards()]
        assert here.model.table.get(1).to_info().trainer_verified
    assert names(tmp_path / "store" / "m" / "v1") == [
        "0.safetensors",
        "1.safetensors",
        "commit.json",
        "manifest.json",
    ]


async def test_the_answer_of_a_commit_outlives_a_restart(tmp_path: Path) -> None:
    async with life(tmp_path) as here:
        begun = await half(here)
        first = await finish(here, begun.push_id, 22 * CHUNK)
    async with life(tmp_path) as here:
        again = await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))
        joined = await here.pushes.begin(begin(idempotency_key="k"), None)
        assert again.already
        assert joined.committed == again
        first.already = True
        assert again == first
        assert await here.push(shards(1)) == 2


async def test_a_slow_disk_is_waited_for_before_too_much_could_be_lost(tmp_path: Path) -> None:
    disk = Threads()
    async with life(tmp_path, fetchers=disk) as here:
        disk.gate = asyncio.Event()
        first = shards()[0]
        begun = await here.pushes.begin(begin(), None)
        messages = [*first.layout(), *first.chunks(CHUNK)]
        sending = asyncio.create_task(here.join(begun.push_id, messages))
        push = here.pushes.find(begun.push_id)
        await until(lambda: bool(push.state.shards) and push.state.shards[0].received > 4 * CHUNK)
        await asyncio.sleep(0.2)
        assert (
            push.state.shards[0].received - push.state.shards[0].durable_bytes
            <= LIMITS["loss_bytes"]
        )
        disk.gate.set()
        await sending
        (progress,) = here.pushes.get(pb.GetPushRequest(push_id=begun.push_id)).shards
        assert progress.received_bytes == len(first.data)
        await until(lambda: push.state.shards[0].verified)
        assert push.state.shards[0].durable_bytes == len(first.data)


@pytest.mark.parametrize("place", [10, 9 * CHUNK, 21 * CHUNK])
async def test_a_flipped_bit_in_what_was_kept_is_sent_again(tmp_path: Path, place: int) -> None:
    begun = await interrupted(tmp_path)
    path = tmp_path / "store" / "m" / "v1" / "0.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    async with life(tmp_path) as here:
        again = await here.pushes.begin(begin(idempotency_key="k"), None)
        offset = received(list(again.shards)).get(0)
        layout = shards()[0].layout() if offset is None else []
        with pytest.raises(WeightSyncError) as caught:
            # Whoever believes the first answer is told the offset of what is whole.
            await here.join(begun.push_id, [*layout, *shards()[0].chunks(CHUNK, 22 * CHUNK)])
        assert caught.value.reason is Reason.OFFSET_MISMATCH
        good = int(caught.value.metadata["received_bytes"])
        assert good <= place
        await finish(here, begun.push_id, good)
        assert here.read(1) == [shard.data for shard in shards()]


@pytest.mark.parametrize("cut", range(0, 400, 23))
async def test_a_list_torn_anywhere_tells_what_it_still_proves(tmp_path: Path, cut: int) -> None:
    begun = await interrupted(tmp_path)
    path = tmp_path / "store" / "m" / "v1" / "0.safetensors.kept"
    whole = checkpoint_index.read(str(path).removesuffix(checkpoint_index.SUFFIX)).end
    torn = path.read_bytes()[:cut]
    path.write_bytes(torn + bytes(64))
    async with life(tmp_path) as here:
        again = await here.pushes.begin(begin(idempotency_key="k"), None)
        offset = received(list(again.shards)).get(0, 0)
        assert offset <= whole
        layout = [] if offset else shards()[0].layout()
        await here.join(begun.push_id, [*layout, *shards()[0].chunks(CHUNK, offset)])
        await finish(here, begun.push_id, len(shards()[0].data))
        assert here.read(1) == [shard.data for shard in shards()]


async def test_a_complete_shard_that_was_damaged_is_missing_at_the_commit(tmp_path: Path) -> None:
    begun = await interrupted(tmp_path)
    path = tmp_path / "store" / "m" / "v1" / "1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    async with life(tmp_path) as here:
        with pytest.raises(WeightSyncError, match="shard 1 from byte 0") as caught:
            await finish(here, begun.push_id, received_after(here, begun.push_id)[0])
        assert caught.value.reason is Reason.PUSH_INCOMPLETE
        await here.join(begun.push_id, shards()[1].chunks(CHUNK))
        await finish(here, begun.push_id, len(shards()[0].data))
        assert here.read(1) == [shard.data for shard in shards()]


def received_after(here: World, push_id: str) -> dict[int, int]:
    return received(list(here.pushes.get(pb.GetPushRequest(push_id=push_id)).shards))


async def test_a_newer_writer_ends_what_survived(tmp_path: Path) -> None:
    begun = await interrupted(tmp_path)
    async with life(tmp_path) as here:
        await here.model.epochs.acquire("another")
        with pytest.raises(WeightSyncError) as caught:
            await here.join(begun.push_id, [chunk(0, 22 * CHUNK, b"x")])
        assert caught.value.reason is Reason.EPOCH_STALE
        await until(lambda: not (tmp_path / "store" / "m" / "v1").exists())


async def test_a_writer_that_was_replaced_in_a_crash_ends_at_the_start(tmp_path: Path) -> None:
    async with life(tmp_path) as here:
        begun = await half(here)
        record = await here.model.store.open_pushes("m")
    async with life(tmp_path) as here:
        await here.model.epochs.acquire("another")
        await here.pushes.close()
        await here.model.store.record_push(record[0].record)
    async with life(tmp_path) as here:
        with pytest.raises(WeightSyncError) as caught:
            here.pushes.find(begun.push_id)
        assert caught.value.reason is Reason.PUSH_UNKNOWN
        assert not (tmp_path / "store" / "m" / "v1").exists()


async def test_what_nobody_asks_for_is_removed_when_it_was_idle_too_long(tmp_path: Path) -> None:
    begun = await interrupted(tmp_path)
    async with life(tmp_path, limits={"resume_timeout_s": 0.1}) as here:
        assert here.model.table.get(1).durability == pb.DURABILITY_RECEIVING
        await until(lambda: not (tmp_path / "store" / "m" / "v1").exists())
        told = here.pushes.get(pb.GetPushRequest(push_id=begun.push_id))
        assert told.durability == pb.DURABILITY_FAILED
        await until(lambda: here.model.table.find(1) is None)


async def test_an_abort_removes_what_survived(tmp_path: Path) -> None:
    begun = await interrupted(tmp_path)
    async with life(tmp_path) as here:
        await here.pushes.abort(pb.AbortPushRequest(push_id=begun.push_id))
        assert not (tmp_path / "store" / "m" / "v1").exists()
        assert await here.push(shards(1)) == 1


async def test_nothing_survives_in_memory(tmp_path: Path) -> None:
    async with life(tmp_path, store="memory://") as here:
        begun = await here.pushes.begin(begin(idempotency_key="k"), None)
        first = shards()[0]
        await here.join(begun.push_id, [*first.layout(), *first.chunks(CHUNK)[:9]])
        (progress,) = here.pushes.get(pb.GetPushRequest(push_id=begun.push_id)).shards
        assert (progress.received_bytes, progress.durable_bytes) == (9 * CHUNK, 0)
    async with life(tmp_path, store="memory://") as here:
        with pytest.raises(WeightSyncError) as caught:
            here.pushes.get(pb.GetPushRequest(push_id=begun.push_id))
        assert caught.value.reason is Reason.PUSH_UNKNOWN


@pytest.mark.parametrize("garbage", [b"", b"{}", bytes(4096), b'{"xxh3_128":"0","document":{}}'])
async def test_a_damaged_record_of_a_push_is_removed(tmp_path: Path, garbage: bytes) -> None:
    begun = await interrupted(tmp_path)
    (tmp_path / "store" / "m" / "v1" / "push.json").write_bytes(garbage)
    async with life(tmp_path) as here:
        with pytest.raises(WeightSyncError) as caught:
            here.pushes.find(begun.push_id)
        assert caught.value.reason is Reason.PUSH_UNKNOWN
        assert not (tmp_path / "store" / "m" / "v1").exists()


async def test_no_slot_leaves_a_push_asleep(tmp_path: Path) -> None:
    begun = await interrupted(tmp_path)
    async with life(tmp_path, limits={"slot_wait_s": 0.05}) as here:
        for version in (5, 6):
            await here.pushes.begin(begin(version=version), None)
        with pytest.raises(WeightSyncError) as caught:
            await here.pushes.begin(begin(idempotency_key="k"), None)
        assert caught.value.reason is Reason.NO_SLOT
        for push in here.pushes.status():
            if push.version > 1:
                await here.pushes.abort(pb.AbortPushRequest(push_id=push.push_id))
        offset = received_after(here, begun.push_id)[0]
        await finish(here, begun.push_id, offset)
        assert here.read(1) == [shard.data for shard in shards()]
