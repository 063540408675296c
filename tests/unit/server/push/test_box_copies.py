"""Boxes that the server copies from writers' GPUs by itself; here a stand-in copies from bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.push.boxes import Held, Writer, sharded, version
from tests.unit.server.push.copier import Copier
from tests.unit.server.world import Threads, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.shm.same_host import PeerCredentials
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.sources.same_host import SameHostOffers, SameHostSession

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.unit.server.world import World

DEVICE = "ab" * 16


class Site:
    """A server whose trainers have GPUs."""

    def __init__(self, here: World, folder: Path) -> None:
        self.world = here
        self.copier = Copier()
        self.offers = SameHostOffers(here.pushes, folder / "t.sock", self.copier)
        self.sessions: list[SameHostSession] = []

    async def connect(self, writer: Writer) -> SameHostSession:
        """Return the session of a writer that has declared its boxes."""
        response = await writer.begin(self.world, same_host=pb.SameHostSource())
        self.offers.offer(response, "unix:", writer.number)
        declared = [[*held.shard.layout(), held.boxes()] for held in writer.held]
        await writer.stream(self.world, [message for each in declared for message in each])
        session = self.offers.session(PeerCredentials(1, 2))
        await asyncio.to_thread(session.redeem, response.same_host_offer.secret)
        self.sessions.append(session)
        return session

    def where(self, held: Held, **other: Any) -> dict[str, Any]:
        """Return what a writer tells of its boxes of a shard."""
        handle = self.copier.allocate(b"before" + b"".join(part.data for part in held.sent))
        places, offset = [], len(b"before")
        for part in held.sent:
            if part.data:
                places.append([0, offset])
            offset += len(part.data)
        replicas = b"".join(tensor_digest(part.data) for part in held.replicas).hex()
        told: dict[str, Any] = {"device": DEVICE, "handles": [handle], "places": places}
        return told | {"replicas": replicas} | other

    async def collect(self, session: SameHostSession, held: Held, **other: Any) -> str:
        where = self.where(held, **other)
        return await asyncio.to_thread(session.collect, held.shard.index, where)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with world(tmp_path) as here:
        made = Site(here, tmp_path)
        yield made
        made.copier.gate.set()
        for session in made.sessions:
            session.close()


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("along", [0, 1])
async def test_boxes_are_copied_proved_and_committed(site: Site, along: int, asked: bool) -> None:
    shards = version()
    writers = sharded(shards, 2, along=along)
    sessions = [await site.connect(writer) for writer in writers]
    for session, writer in zip(sessions, writers, strict=True):
        for held in writer.held:
            assert await site.collect(session, held, digests=asked) == ""
    for session, writer in zip(sessions, writers, strict=True):
        for held in writer.held:
            digests = b"".join(tensor_digest(part.data) for part in held.sent if asked)
            assert await asyncio.to_thread(session.collected, held.shard.index) == digests
    replies = await asyncio.gather(*(writer.commit(site.world) for writer in writers))
    (number,) = {reply.version for reply in replies}
    assert site.world.read(number) == [shard.data for shard in shards]
    assert len(set(site.copier.trainers)) == 2


async def test_one_is_copied_and_another_streams(site: Site) -> None:
    shards = version(1)
    near, far = sharded(shards, 2)
    session = await site.connect(near)
    await far.begin(site.world)
    await far.stream(site.world)
    for held in near.held:
        assert await site.collect(session, held) == ""
    replies = await asyncio.gather(near.commit(site.world), far.commit(site.world))
    assert site.world.read(replies[0].version) == [shard.data for shard in shards]


async def test_a_replica_that_differs_from_what_was_copied_fails_the_push(site: Site) -> None:
    first, other = sharded(version(2, shards=1), 2)
    sessions = [await site.connect(first), await site.connect(other)]
    await site.collect(sessions[0], first.held[0], digests=True)
    wrong = tensor_digest(b"wrong").hex() * len(other.held[0].replicas)
    await site.collect(sessions[1], other.held[0], replicas=wrong, digests=True)
    for session in sessions:
        with pytest.raises(WeightSyncError, match="writers 0 and 1") as caught:
            await asyncio.to_thread(session.collected, 0)
        assert caught.value.reason is Reason.DIGEST_MISMATCH


async def test_memory_that_cannot_be_reached_is_written_instead(site: Site) -> None:
    shards = version(3, shards=1)
    first, other = sharded(shards, 2)
    session = await site.connect(first)
    site.copier.errors.append(WeightSyncError(Reason.NOT_SUPPORTED, "it opens nothing here"))
    assert await site.collect(session, first.held[0]) == "it opens nothing here"
    session.close()
    await first.stream(site.world)
    replies = await asyncio.gather(first.commit(site.world), other.push(site.world))
    assert site.world.read(replies[0].version) == [shards[0].data]


@pytest.mark.parametrize(
    "other",
    [{"places": [[0, 0]]}, {"replicas": "00"}, {"handles": ["xx"]}, {"device": "no"}],
)
async def test_what_has_not_the_form_is_refused_and_changes_nothing(
    site: Site, other: dict[str, Any]
) -> None:
    first, _ = sharded(version(4, shards=1), 2)
    session = await site.connect(first)
    with pytest.raises(WeightSyncError) as caught:
        await site.collect(session, first.held[0], **other)
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert site.copier.begun == []
    assert await site.collect(session, first.held[0]) == ""


async def test_the_memory_is_nobody_elses_while_it_is_copied(site: Site) -> None:
    first, other = sharded(version(5), 2)
    session = await site.connect(first)
    await site.connect(other)
    assert await site.collect(session, first.held[0]) == ""
    site.copier.gate.clear()
    assert await site.collect(session, first.held[1]) == ""
    aborting = asyncio.create_task(
        site.world.pushes.abort(pb.AbortPushRequest(push_id=first.push_id))
    )
    await asyncio.sleep(0.1)
    assert not aborting.done()
    site.copier.gate.set()
    await aborting
    assert site.copier.busy == 0


async def copied_once(site: Site, shards: int = 2) -> tuple[SameHostSession, Writer, Writer]:
    """Return a session from whose device something was copied, and writers that have declared."""
    first, other = sharded(version(6, shards=shards), 2)
    session = await site.connect(first)
    await site.connect(other)
    assert await site.collect(session, first.held[0]) == ""
    return session, first, other


async def test_what_is_being_copied_is_neither_copied_again_nor_written(site: Site) -> None:
    session, first, other = await copied_once(site)
    site.copier.gate.clear()
    assert await site.collect(session, first.held[1]) == ""
    with pytest.raises(WeightSyncError, match="are being copied") as caught:
        await site.collect(session, first.held[1])
    assert caught.value.reason is Reason.SHARD_BUSY
    with pytest.raises(WeightSyncError, match="are being copied"):
        await asyncio.to_thread(session.lend, 1)
    parts = first.held[1].sent + first.held[1].replicas
    digests = b"".join(tensor_digest(part.data) for part in parts)
    with pytest.raises(WeightSyncError, match="was not shared"):
        await asyncio.to_thread(session.written, 1, digests)
    site.copier.gate.set()
    await other.stream(site.world)
    replies = await asyncio.gather(first.commit(site.world), other.commit(site.world))
    shards = [held.shard.data for held in first.held]
    assert site.world.read(replies[0].version) == shards


async def test_what_nobody_has_digested_counts_as_that(site: Site) -> None:
    _, first, other = await copied_once(site, 1)
    await other.stream(site.world)
    replies = await asyncio.gather(first.commit(site.world), other.commit(site.world))
    commit = site.world.model.table.get(replies[0].version).commit
    assert commit is not None
    assert not commit.trainer_verified


async def test_fetchers_that_are_lost_fail_the_push_for_who_waits_for_digests(site: Site) -> None:
    assert isinstance(site.world.fetchers, Threads)
    site.world.fetchers.errors.append(WeightSyncError(Reason.FETCHER_FAILED, "three were lost"))
    writers = sharded(version(7, shards=1), 2)
    sessions = [await site.connect(writer) for writer in writers]
    for session, writer in zip(sessions, writers, strict=True):
        await site.collect(session, writer.held[0], digests=True)
    for session in sessions:
        with pytest.raises(WeightSyncError, match="three were lost"):
            await asyncio.to_thread(session.collected, 0)


async def test_who_waits_for_digests_is_not_blamed_for_who_is_slow(tmp_path: Path) -> None:
    async with world(tmp_path, limits={"writer_timeout_s": 1.5}) as here:
        site = Site(here, tmp_path)
        near, far = sharded(version(8, shards=1), 2)
        far.held[0].chunk_bytes = 40
        session = await site.connect(near)
        await site.collect(session, near.held[0], digests=True)
        waiting = asyncio.create_task(asyncio.to_thread(session.collected, 0))
        await far.begin(here)
        for message in far.held[0].all():
            await far.stream(here, [*far.held[0].shard.layout(), far.held[0].boxes(), message])
            await asyncio.sleep(0.4)
        assert await waiting
        session.close()
