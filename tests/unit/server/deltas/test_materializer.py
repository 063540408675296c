"""Versions are made again: after an eviction, a restart, a fault, from whatever is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.deltas import delta_begin, delta_of, every_dtype
from tests.unit.server.deltas.pushing import (
    Version,
    history,
    push_chain,
    push_delta,
    send,
    sparse_history,
    until,
)
from tests.unit.server.world import Threads, World, begin, content, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.scrubber import Scrubber

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync.model.manifest import Manifest, ShardEntry
    from weightsync.shm.segments import Segment


def _scrubber(here: World) -> Scrubber:
    model = here.model
    return Scrubber(model.table, model.store, model.materializer.lock, 1 << 40)


class Watched(Threads):
    """Notes what is asked, and does harm when it is told to.

    Attributes:
        asked: Names of the tasks, in order.
        lose: So many patches do their work and then tell that their fetcher was lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.lose = 0

    async def copy(self, source: Segment, size: int, segment: Segment) -> None:
        self.asked.append("copy")
        await super().copy(source, size, segment)

    async def load(self, source_fd: int | str, size: int, segment: Segment) -> None:
        self.asked.append("load")
        await super().load(source_fd, size, segment)

    async def patch(
        self,
        segment: Segment,
        index: int,
        layout: Segment,
        shard: ShardEntry,
        source: Segment | str,
    ) -> None:
        self.asked.append("patch")
        await super().patch(segment, index, layout, shard, source)
        if self.lose:
            self.lose -= 1
            raise WeightSyncError(Reason.FETCHER_FAILED, "a patch cost 1 fetcher process")

    def taken(self) -> set[str]:
        """Return what was asked since the last call."""
        asked, self.asked = set(self.asked), []
        return asked


async def read_back(here: World, version: int, expected: Version) -> None:
    """Stage a version and compare every byte."""
    lease = await here.model.stager.stage(version, 20, for_engine=False)
    try:
        assert here.read(version) == [shard.data for shard in expected]
    finally:
        lease.release()


async def test_any_version_of_a_chain_can_be_read_after_a_restart(tmp_path: Path) -> None:
    contents = history(5)
    async with world(tmp_path) as here:
        await push_chain(here, contents)
    async with world(tmp_path) as here:
        for version in (6, 1, 4, 5, 2, 3, 6):
            await read_back(here, version, contents[version - 1])
            info = here.model.table.get(version).to_info()
            assert info.chain_length == version - 1
        await here.model.segments.unmapped()
        assert here.budget.reserved == here.model.slots.reserved_bytes


async def test_a_slot_of_the_version_before_is_patched_in_place(tmp_path: Path) -> None:
    contents = sparse_history(4)
    fetchers = Watched()
    async with world(tmp_path, fetchers=fetchers) as here:
        await push_chain(here, contents[:2])
        # The base lies in one slot, nothing in the other.
        assert fetchers.taken() == {"copy", "patch"}
        for version in (3, 4, 5):
            segments = {s.id for slot in here.model.slots.slots for s in slot.segments.values()}
            await push_delta(here, contents[version - 2], contents[version - 1], version)
            assert fetchers.taken() == {"patch"}
            slots = here.model.slots.slots
            assert {s.id for slot in slots for s in slot.segments.values()} == segments
            assert here.read(version) == [shard.data for shard in contents[version - 1]]


async def test_the_base_itself_gives_its_slot_when_there_is_no_other(tmp_path: Path) -> None:
    contents = history(2)
    fetchers = Watched()
    async with world(tmp_path, fetchers=fetchers) as here:
        await push_chain(here, contents[:2])
        here.model.serving.engine("engine").set_live(1)
        fetchers.taken()
        await push_delta(here, contents[1], contents[2], 3)
        assert fetchers.taken() == {"patch"}
        assert here.read(3) == [shard.data for shard in contents[2]]
        assert here.model.table.get(2).to_info().residency == pb.RESIDENCY_ABSENT
        here.model.serving.engine("engine").set_live(3)
        await read_back(here, 2, contents[1])


async def test_without_a_store_too(tmp_path: Path) -> None:
    contents = history(2)
    async with world(tmp_path, store="memory://") as here:
        await push_chain(here, contents[:2])
        here.model.serving.engine("engine").set_live(1)
        await push_delta(here, contents[1], contents[2], 3)
        assert here.read(3) == [shard.data for shard in contents[2]]
        # It was the only copy, as a full push would have had it.
        assert here.model.table.find(2) is None
        info = here.model.table.get(3).to_info()
        assert (info.kind, info.base_version, info.chain_length) == (pb.PUSH_KIND_FULL, 0, 0)
        assert info.changed_fraction > 0


@pytest.mark.parametrize("store", ["", "memory://"])
async def test_others_do_not_get_the_slot_of_a_base_that_is_nowhere_else(
    tmp_path: Path, store: str
) -> None:
    contents = history(1)
    async with world(tmp_path, store=store, slots=2, limits={"slot_wait_s": 0.2}) as here:
        await here.push(contents[0], 1)
        await here.pushes.begin(begin(version=2, **delta_begin(contents[0])), None)
        if store:
            with pytest.raises(WeightSyncError) as caught:
                await here.pushes.begin(begin(version=3), 0.2)
            assert caught.value.reason is Reason.NO_SLOT
        else:
            await here.pushes.begin(begin(version=3), 5)
            assert here.model.table.get(1).slot is None


@pytest.mark.parametrize("at", [0, 8, -1], ids=["length", "header", "data"])
async def test_what_remains_in_a_slot_is_not_believed(tmp_path: Path, at: int) -> None:
    contents = history(3)
    fetchers = Watched()
    async with world(tmp_path, fetchers=fetchers) as here:
        await push_chain(here, contents[:3])
        # Somebody wrote into the slot that the next version will be made in.
        oldest = here.model.table.get(2).place
        view = oldest.segments[1].view
        size = len(contents[1][1].data)
        view[at % size] ^= 0xFF
        fetchers.taken()
        await push_delta(here, contents[2], contents[3], 4)
        assert "copy" in fetchers.taken()
        assert here.read(4) == [shard.data for shard in contents[3]]


async def test_a_lost_fetcher_costs_a_copy_and_no_byte(tmp_path: Path) -> None:
    contents = history(3)
    fetchers = Watched()
    async with world(tmp_path, fetchers=fetchers) as here:
        await push_chain(here, contents[:3])
        fetchers.taken()
        # The patch has been written when the fetcher dies: once more would be wrong.
        fetchers.lose = 1
        await push_delta(here, contents[2], contents[3], 4)
        assert "copy" in fetchers.taken()
        assert here.read(4) == [shard.data for shard in contents[3]]
        fetchers.lose = 1
        await read_back(here, 2, contents[1])


async def test_fetchers_that_always_die_leave_the_push_open(tmp_path: Path) -> None:
    contents = history(1)
    fetchers = Watched()
    async with world(tmp_path, fetchers=fetchers) as here:
        await here.push(contents[0], 1)
        fetchers.lose = 1000
        with pytest.raises(WeightSyncError) as caught:
            await push_delta(here, contents[0], contents[1], 2, idempotency_key="k")
        assert caught.value.reason is Reason.FETCHER_FAILED
        fetchers.lose = 0
        (push,) = here.pushes._open.values()
        request = pb.CommitPushRequest(push_id=push.state.id, content_digest=content(contents[1]))
        answer = await here.pushes.commit(request)
        assert answer.content_digest == content(contents[1])
        assert here.read(2) == [shard.data for shard in contents[1]]


async def test_a_damaged_delta_in_the_store_is_found_and_named(tmp_path: Path) -> None:
    contents = history(2)
    async with world(tmp_path) as here:
        await push_chain(here, contents)
    path = tmp_path / "store" / "m" / "v2" / "delta-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    async with world(tmp_path) as here:
        await read_back(here, 1, contents[0])
        for version in (2, 3):
            with pytest.raises(WeightSyncError, match="delta of version 2") as caught:
                await here.model.stager.stage(version, 20)
            assert caught.value.reason is Reason.DATA_CORRUPT
            assert here.model.table.get(version).slot is None


async def test_a_base_that_cannot_be_read_asks_for_a_full_push(tmp_path: Path) -> None:
    contents = history(1)
    async with world(tmp_path) as here:
        await here.push(contents[0], 1)
    path = tmp_path / "store" / "m" / "v1" / "0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    async with world(tmp_path) as here:
        with pytest.raises(WeightSyncError, match="in full") as caught:
            await push_delta(here, contents[0], contents[1], 2)
        assert caught.value.reason is Reason.BASE_MISMATCH
        await here.push(every_dtype(4), 2)


async def test_a_version_that_is_not_durable_yet_can_be_staged(tmp_path: Path) -> None:
    contents = history(1)
    async with world(tmp_path) as here:
        await here.push(contents[0], 1)
        shards = delta_of(contents[0], contents[1])
        begun = await send(
            here, shards, 2, None, shard_count=len(shards), **delta_begin(contents[0])
        )
        push = here.pushes.find(begun.push_id)
        await until(lambda: push.state.record.residency == pb.RESIDENCY_STAGED)
        lease = await here.model.stager.stage(2, 5, durable=False)
        assert here.read(2) == [shard.data for shard in contents[1]]
        # Committed while an apply holds it.
        request = pb.CommitPushRequest(push_id=push.state.id, content_digest=content(contents[1]))
        await here.pushes.commit(request)
        lease.release()
        assert here.model.table.get(2).to_info().base_version == 1


async def test_damaged_deltas_are_found_by_the_scrubber(tmp_path: Path) -> None:
    contents = history(2)
    async with world(tmp_path) as here:
        await push_chain(here, contents)
        scrubber = _scrubber(here)
        record = here.model.table.get(2)
        await scrubber.scrub(record)
        assert record.damaged == ""
        path = tmp_path / "store" / "m" / "v2" / "delta-1.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        await scrubber.scrub(record)
        assert "wsd1" in record.damaged
        # No base any more, nor is what is based on it; what lies in memory is served all the same.
        with pytest.raises(WeightSyncError, match="version 2 is damaged"):
            await push_delta(here, contents[2], every_dtype(), 4)
        await read_back(here, 3, contents[2])
        path.write_bytes(data)
        await scrubber.scrub(record)
        assert record.damaged == ""


async def test_a_fold_under_the_scrubber_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = history(1)
    async with world(tmp_path) as here:
        await push_chain(here, contents)
        record = here.model.table.get(2)
        lease = await here.model.stager.stage(2, 20)
        read = here.model.store.delta

        async def folded_meanwhile(model: str, version: int) -> Manifest:
            manifest = await read(model, version)
            await here.model.compactor._fold(record)
            return manifest

        monkeypatch.setattr(here.model.store, "delta", folded_meanwhile)
        await _scrubber(here).scrub(record)
        assert (record.base, record.damaged) == (None, "")
        lease.release()
