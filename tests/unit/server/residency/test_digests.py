"""Digests that are begun shard by shard: each once, and none goes on when its lease ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.world import Threads, World, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.residency.slot import SlotLease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from weightsync.model.manifest import ShardEntry
    from weightsync.shm.segments import Segment


class Gated(Threads):
    """Digests when `go` is set; it takes a while to let one go that is cancelled.

    Attributes:
        begun: Segments, in the order in which digests of them were begun.
        at: Segments that are being digested.
    """

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()
        self.begun: list[Segment] = []
        self.at: list[Segment] = []

    async def digest(self, segment: Segment, shard: ShardEntry) -> list[bytes]:
        self.begun.append(segment)
        self.at.append(segment)
        try:
            await self.go.wait()
            return await super().digest(segment, shard)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            raise
        finally:
            self.at.remove(segment)


@pytest.fixture
def fetchers() -> Gated:
    return Gated()


@pytest.fixture
async def here(tmp_path: Path, fetchers: Gated) -> AsyncIterator[World]:
    async with world(tmp_path, fetchers=fetchers) as made:
        await made.push(simple(1, shards=3))
        fetchers.begun.clear()
        yield made


@pytest.fixture
async def lease(here: World) -> AsyncIterator[SlotLease]:
    with await here.model.stager.stage(1, 5) as held:
        yield held


async def test_each_shard_is_digested_once(here: World, lease: SlotLease, fetchers: Gated) -> None:
    async with here.model.stager.digesting(lease) as digests:
        for count in (0, 1, 1, 0, 2, -1):
            digests.begin(count)
        await asyncio.sleep(0.01)
        assert fetchers.begun == lease.segments[:2]
        await here.model.stager.verify(lease, digests)
    assert fetchers.begun == lease.segments


async def test_more_than_there_are(here: World, lease: SlotLease, fetchers: Gated) -> None:
    async with here.model.stager.digesting(lease) as digests:
        digests.begin(1 << 40)
        await here.model.stager.verify(lease, digests)
    assert fetchers.begun == lease.segments


@pytest.mark.parametrize("shard", [0, 2])
async def test_damage_is_named_and_the_others_come_to_their_end(
    here: World, lease: SlotLease, fetchers: Gated, shard: int
) -> None:
    lease.segments[shard].view[300] ^= 1
    async with here.model.stager.digesting(lease) as digests:
        digests.begin(2)
        with pytest.raises(WeightSyncError, match=f"s{shard}.a") as caught:
            await here.model.stager.verify(lease, digests)
        assert caught.value.reason is Reason.DATA_CORRUPT
        assert not fetchers.at


async def test_nobody_is_at_a_segment_when_they_have_ended(
    here: World, lease: SlotLease, fetchers: Gated
) -> None:
    fetchers.go.clear()

    async def fail() -> None:
        async with here.model.stager.digesting(lease) as digests:
            digests.begin(2)
            await asyncio.sleep(0.01)
            assert len(fetchers.at) == 2
            raise RuntimeError("the ranks failed")

    with pytest.raises(RuntimeError, match="the ranks failed"):
        await fail()
    assert not fetchers.at


async def test_nobody_is_at_a_segment_when_the_proof_is_cancelled(
    here: World, lease: SlotLease, fetchers: Gated
) -> None:
    fetchers.go.clear()

    async def prove() -> None:
        async with here.model.stager.digesting(lease) as digests:
            await here.model.stager.verify(lease, digests)

    task = asyncio.create_task(prove())
    await asyncio.sleep(0.01)
    assert len(fetchers.at) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not fetchers.at


async def test_what_was_forgotten_is_digested_again(
    here: World, lease: SlotLease, fetchers: Gated
) -> None:
    async with here.model.stager.digesting(lease) as digests:
        digests.begin(3)
        await asyncio.sleep(0.05)
        await digests.cancel()
        lease.segments[0].view[300] ^= 1
        digests.begin(1)
        with pytest.raises(WeightSyncError, match=r"s0\.a"):
            await here.model.stager.verify(lease, digests)
    assert len(fetchers.begun) == 6


async def test_what_readers_have_proved_is_not_digested_again(
    here: World, lease: SlotLease, fetchers: Gated
) -> None:
    async with here.model.stager.digesting(lease) as digests:
        digests.trust(frozenset({0, 2}))
        await here.model.stager.verify(lease, digests)
        assert fetchers.begun == lease.segments[1:2]
        # Another reader proves for itself.
        await digests.cancel()
        await here.model.stager.verify(lease, digests)
    assert sorted(s.id for s in fetchers.begun[1:]) == sorted(s.id for s in lease.segments)


async def test_damage_in_what_nobody_has_proved_is_found(here: World, lease: SlotLease) -> None:
    lease.segments[1].view[lease.record.manifest.layout.shards[1].data_start] ^= 1  # type: ignore[union-attr]  # it is staged
    async with here.model.stager.digesting(lease) as digests:
        digests.trust(frozenset({0, 2}))
        with pytest.raises(WeightSyncError) as caught:
            await here.model.stager.verify(lease, digests)
    assert caught.value.reason is Reason.DATA_CORRUPT
