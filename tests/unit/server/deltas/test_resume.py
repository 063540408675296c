"""Pushes of deltas that outlive the server."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.deltas import delta_begin, delta_of
from tests.support.processes import names
from tests.support.threads import stand_still
from tests.unit.server.deltas.pushing import history, push_chain, push_delta, until
from tests.unit.server.world import Threads, World, begin, content, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync.model.manifest import Manifest
    from weightsync.shm.segments import Segment

CHUNK = 500
LIMITS = {"keep_bytes": 4 * CHUNK, "loss_bytes": 8 * CHUNK}


async def half(here: World, contents: list[Any]) -> pb.BeginPushResponse:
    """Send shard 1 and half of shard 0; return when what came is durable."""
    shards = delta_of(contents[0], contents[1])
    fields = delta_begin(contents[0], version=2, shard_count=2, idempotency_key="k")
    begun = await here.pushes.begin(begin(**fields), None)
    await here.join(begun.push_id, shards[1].all(CHUNK))
    first = shards[0]
    await here.join(begun.push_id, [*first.layout(), *first.chunks(CHUNK)[:6]])
    push = here.pushes.find(begun.push_id)
    await until(lambda: push.state.shards[1].verified and push.state.shards[0].durable_bytes > 0)
    return begun


@pytest.mark.parametrize("restarts", [1, 2])
async def test_a_delta_goes_on_after_a_restart(tmp_path: Path, restarts: int) -> None:
    contents = history(1)
    async with world(tmp_path, limits=LIMITS) as here:
        await here.push(contents[0], 1)
        begun = await half(here, contents)
    folder = tmp_path / "store" / "m" / "v2"
    assert "delta-0.safetensors.kept" in names(folder)
    for _ in range(restarts - 1):
        async with world(tmp_path, limits=LIMITS) as here:
            # Asleep: nothing was asked of it, and its base stays all the same.
            assert here.model.table.get(1).holds == 1
    async with world(tmp_path, limits=LIMITS) as here:
        shards = delta_of(contents[0], contents[1])
        fields = delta_begin(contents[0], version=2, shard_count=2, idempotency_key="k")
        again = await here.pushes.begin(begin(**fields), None)
        assert again.push_id == begun.push_id
        offset = {p.shard: p.received_bytes for p in again.shards}
        assert 0 < offset[0] < len(shards[0].data)
        assert offset[1] == len(shards[1].data)
        await here.join(begun.push_id, [*shards[0].chunks(CHUNK, offset[0]), *shards[0].given()])
        request = pb.CommitPushRequest(push_id=begun.push_id, content_digest=content(contents[1]))
        await here.pushes.commit(request)
        assert here.read(2) == [shard.data for shard in contents[1]]
        assert here.model.table.get(1).holds == 0
        assert not [name for name in names(folder) if name.endswith((".kept", "push.json"))]


async def test_a_delta_whose_base_is_gone_is_dropped_at_the_restart(tmp_path: Path) -> None:
    contents = history(1)
    async with world(tmp_path, limits=LIMITS) as here:
        await here.push(contents[0], 1)
        await half(here, contents)
    (tmp_path / "store" / "m" / "v1" / "commit.json").write_bytes(b"{}")
    async with world(tmp_path, limits=LIMITS) as here:
        assert here.model.table.list() == []
        assert not (tmp_path / "store" / "m" / "v2").exists()
        assert here.pushes._open == {}


async def test_a_committed_delta_is_known_by_its_key_after_a_restart(tmp_path: Path) -> None:
    contents = history(2)
    async with world(tmp_path) as here:
        await push_chain(here, contents[:2])
        first = await push_delta(here, contents[1], contents[2], 3, idempotency_key="k")
    async with world(tmp_path) as here:
        fields = delta_begin(contents[1], version=3, idempotency_key="k")
        again = await here.pushes.begin(begin(**fields), None)
        assert again.committed.already
        assert again.committed.stored_bytes == first.stored_bytes


class Held(Threads):
    """Reads nothing before `go` is set; who cancels a read waits for that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.cancelled = asyncio.Event()
        self.go = asyncio.Event()

    async def load(self, source_fd: int | str, size: int, segment: Segment) -> None:
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            await self.go.wait()
            raise
        await super().load(source_fd, size, segment)


async def asleep(folder: Path, **fields: Any) -> dict[str, Any]:
    """Begin a delta in one life of the server; return how to begin it again in the next."""
    base = history(0)[0]
    again = delta_begin(base, version=2, idempotency_key="k", **fields)
    async with world(folder) as here:
        await here.push(base, 1)
        await here.pushes.begin(begin(**again), None)
    return again


async def test_a_push_is_not_woken_again_before_the_first_try_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = await asleep(tmp_path, total_bytes=64 << 20)
    fetchers = Held()
    async with world(tmp_path, fetchers=fetchers, memory=16 << 20) as here:
        store = here.model.store
        free_bytes = store.free_bytes

        def asked() -> int:
            # The base is being laid when the memory turns out to be too little.
            fetchers.begun.wait(20)
            return free_bytes()

        monkeypatch.setattr(store, "free_bytes", asked)
        first = asyncio.create_task(here.pushes.begin(begin(**again), None))
        await fetchers.cancelled.wait()
        second = asyncio.create_task(here.pushes.begin(begin(**again), None))
        await stand_still()
        fetchers.go.set()
        for call in (first, second):
            with pytest.raises(WeightSyncError) as caught:
                await call
            assert caught.value.reason is Reason.MEMORY_EXHAUSTED
        assert [slot.state for slot in here.model.slots.status()] == ["free", "free"]


async def test_an_abort_ends_the_waking_and_is_what_the_call_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = await asleep(tmp_path)
    async with world(tmp_path) as here:
        store = here.model.store
        manifest, reading, go = store.manifest, asyncio.Event(), asyncio.Event()

        async def slow(model: str, version: int) -> Manifest:
            reading.set()
            await go.wait()
            return await manifest(model, version)

        monkeypatch.setattr(store, "manifest", slow)
        waking = asyncio.create_task(here.pushes.begin(begin(**again), None))
        await reading.wait()
        push_id = here.pushes.status()[0].push_id
        await here.pushes.abort(pb.AbortPushRequest(push_id=push_id))
        go.set()
        with pytest.raises(WeightSyncError) as caught:
            await waking
        assert caught.value.reason is Reason.PUSH_ABORTED
        assert [slot.state for slot in here.model.slots.status()] == ["free", "free"]
        assert here.model.table.get(1).holds == 0
        assert not (tmp_path / "store" / "m" / "v2").exists()
