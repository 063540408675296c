"""Shards that the server copies from a GPU by itself; here a stand-in copies from bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.push.copier import Copier
from tests.unit.server.world import MODEL, begin, content, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.incoming_version import HANDLE_BYTES, ArrivalReader, IpcAddresses
from weightsync.shm.same_host import PeerCredentials
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.sources.same_host import SameHostOffers, SameHostSession
from weightsync_server.residency.incoming import IncomingReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tests.unit.server.world import Shard, World

DEVICE, OTHER = "ab" * 16, "cd" * 16


@dataclass
class Site:
    """A push whose layout was told, and desks of its trainers."""

    world: World
    offers: SameHostOffers
    copier: Copier
    shards: list[Shard]
    key: str = "k"
    layout: str = ""
    push_id: str = ""
    sessions: list[SameHostSession] = field(default_factory=list)

    async def connect(self) -> SameHostSession:
        """Return the session of one more connection of the trainer."""
        response = await self.world.pushes.begin(self._begin(), 10)
        self.push_id = response.push_id
        self.offers.offer(response, "unix:")
        layout = [part for shard in self.shards for part in shard.layout()]
        await self.world.join(self.push_id, layout)
        session = self.offers.session(PeerCredentials(1, 2))
        await asyncio.to_thread(session.redeem, response.same_host_offer.secret)
        self.sessions.append(session)
        return session

    def _begin(self) -> pb.BeginPushRequest:
        facts = {"idempotency_key": self.key, "layout_digest": self.layout}
        return begin(same_host=pb.SameHostSource(), shard_count=len(self.shards), **facts)

    def where(self, index: int, **other: Any) -> dict[str, Any]:
        """Return what a trainer tells of a shard, whose tensors lie in the order of the file."""
        shard = self.shards[index]
        start = len(shard.data) - max(entry.end for entry in shard.entries)
        handle = self.copier.allocate(b"before" + shard.data[start:])
        places = [[0, len(b"before") + entry.begin] for entry in shard.entries]
        told = {"device": DEVICE, "handles": [handle], "places": places}
        return {"op": "collect", "header": shard.data[:start].hex(), **told, **other}

    async def commit(self) -> int:
        request = pb.CommitPushRequest(push_id=self.push_id, content_digest=content(self.shards))
        return (await self.world.pushes.commit(request)).version

    async def send(self, index: int) -> None:
        """Send a shard on a stream."""
        await self.world.join(self.push_id, self.shards[index].all())

    def received(self) -> list[int]:
        response = self.world.pushes.get(pb.GetPushRequest(push_id=self.push_id))
        return [progress.received_bytes for progress in response.shards]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    copier = Copier()
    async with world(tmp_path) as made:
        site = Site(
            made, SameHostOffers(made.pushes, tmp_path / "t.sock", copier), copier, simple(5)
        )
        yield site
        copier.gate.set()
        for session in site.sessions:
            session.close()
        await until(lambda: not copier.busy)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another task changes it
            await asyncio.sleep(0.005)


async def collect(session: SameHostSession, site: Site, index: int, **other: Any) -> str:
    return await asyncio.to_thread(session.collect, index, site.where(index, **other))


async def refused(asked: Awaitable[Any]) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as told:
        await asked
    assert len(told.value.message) > 20
    return told.value


async def begun(session: SameHostSession, site: Site, *indices: int) -> None:
    """Have copies begin that do not end before the gate is open."""
    # The first of a device is waited for; whose copy is held up is another.
    site.copier.errors.clear()
    for index in indices:
        assert await collect(session, site, index) == ""


@pytest.fixture
async def copying(site: Site) -> SameHostSession:
    """A desk for which shard 0 is copied and shard 1 is being copied."""
    session = await site.connect()
    await begun(session, site, 0)
    site.copier.gate.clear()
    await begun(session, site, 1)
    await until(lambda: site.copier.busy == 1)
    return session


async def test_shards_are_copied_proved_and_committed(site: Site) -> None:
    session = await site.connect()
    for index in (0, 1):
        assert await collect(session, site, index) == ""
    for index, shard in enumerate(site.shards):
        assert await asyncio.to_thread(session.collected, index) == b"".join(shard.digests)
    version = await site.commit()
    assert site.world.read(version) == [shard.data for shard in site.shards]
    commit = site.world.model.table.get(version).commit
    assert commit is not None
    # Nobody but the server has computed them.
    assert not commit.trainer_verified
    assert site.world.meters.received == sum(len(shard.data) for shard in site.shards)
    assert len(set(site.copier.trainers)) == 1


async def coming_to(site: Site) -> tuple[SameHostSession, IncomingReader]:
    """Return the session of a push that engines may read as it comes."""
    coming: list[IncomingReader] = []
    site.world.model.events.on(IncomingReader, coming.append)
    while not coming:
        # Slots are used again whose segments fit.
        site.shards, site.key = simple(len(site.sessions)), str(len(site.sessions))
        session = await site.connect()
        if not coming:
            await begun(session, site, 0, 1)
            version = await site.commit()
            site.layout = site.world.model.table.get(version).to_info().layout_digest
    await coming[0].offer()
    return session, coming[0]


def marks(arriving: IncomingReader) -> list[tuple[int, bool]]:
    """Return the shards that engines may read, and whether on a GPU."""
    assert arriving._writer is not None
    reader = ArrivalReader(arriving._writer.segment.view)
    return [(mark.shard, mark.on_gpu) for mark in reader.arrivals(lambda _: True, 60)]


async def test_engines_are_told_where_shards_lie_that_were_read_from_there_before(
    site: Site,
) -> None:
    session, arriving = await coming_to(site)
    told = site.where(0)
    site.copier.gate.clear()
    asked = asyncio.create_task(asyncio.to_thread(session.collect, 0, told))
    await until(lambda: site.copier.busy == 1)
    assert marks(arriving) == [], "nobody has read from there"
    site.copier.gate.set()
    assert await asked == ""
    await asyncio.to_thread(session.collected, 0)
    assert marks(arriving) == [(0, True), (0, False)]
    await begun(session, site, 1)
    await site.commit()

    # The next version lies where this one did.
    site.key = "next"
    session, arriving = await coming_to(site)
    site.copier.gate.clear()
    other = site.where(1)
    await asyncio.to_thread(session.announce_ipc, {0: told, 1: other})
    assert marks(arriving) == [(0, True)]
    assert arriving._writer is not None
    places = ArrivalReader(arriving._writer.segment.view).ipc_addresses(0)
    assert places == [(bytes.fromhex(told["handles"][n]), at) for n, at in told["places"]]
    for index, where in enumerate((told, other)):
        site.copier.gate.set()
        assert await asyncio.to_thread(session.collect, index, where) == ""
    for index in (0, 1):
        await asyncio.to_thread(session.collected, index)
    assert marks(arriving) == [(0, False), (1, False)]


async def test_memory_of_which_reading_failed_is_not_known_any_more(site: Site) -> None:
    session, arriving = await coming_to(site)
    told = site.where(0)
    session._gpu_copies._places.add(*lying_of(told, site))
    site.copier.errors = [WeightSyncError(Reason.FETCHER_FAILED, "the device failed; push again")]
    await refused(asyncio.to_thread(session.collect, 0, told))
    assert not session._gpu_copies._places.have(*lying_of(told, site))
    assert marks(arriving) == [(0, True)]


def lying_of(told: dict[str, Any], site: Site) -> tuple[IpcAddresses, list[int]]:
    places = [(bytes.fromhex(told["handles"][n]), at) for n, at in told["places"]]
    sizes = [entry.end - entry.begin for entry in site.shards[0].entries]
    return places, sizes


@pytest.mark.parametrize("wrong", [{"places": []}, {"device": "x"}, {"handles": ["00"]}])
async def test_where_shards_lie_is_checked_for_its_form(site: Site, wrong: dict[str, Any]) -> None:
    session, arriving = await coming_to(site)
    error = await refused(asyncio.to_thread(session.announce_ipc, {0: site.where(0) | wrong}))
    assert error.reason is Reason.REQUEST_INVALID
    assert marks(arriving) == []


async def test_only_the_first_of_each_device_is_waited_for(site: Site) -> None:
    site.shards = simple(5, shards=3)
    session = await site.connect()
    site.copier.gate.clear()
    first = asyncio.create_task(collect(session, site, 0))
    await until(lambda: site.copier.busy == 1)
    assert not first.done()
    site.copier.gate.set()
    assert await first == ""
    site.copier.gate.clear()
    assert await collect(session, site, 1) == ""
    other = asyncio.create_task(collect(session, site, 2, device=OTHER))
    await until(lambda: site.copier.busy == 2)
    assert not other.done()
    site.copier.gate.set()
    assert await other == ""
    assert site.copier.begun == [DEVICE, DEVICE, OTHER]


async def test_what_cannot_be_reached_is_lent_on_the_same_connection(site: Site) -> None:
    session = await site.connect()
    for told in ("no driver", "no such device"):
        site.copier.errors.append(WeightSyncError(Reason.NOT_SUPPORTED, told))
        assert await collect(session, site, 0) == told
    assert (await asyncio.to_thread(session.lend, 0)).fd > 0
    assert await collect(session, site, 1) == ""
    assert site.received() == [0, len(site.shards[1].data)]


async def test_a_shard_of_very_many_tensors_is_declined_unread(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync_server.push.sources.gpu_copies.MOST_PLACES", 1)
    session = await site.connect()
    assert "2 tensors" in await asyncio.to_thread(session.collect, 0, {})
    assert not site.copier.begun


async def test_what_is_opened_for_one_connection_is_not_kept_open_by_another(site: Site) -> None:
    first, other = await site.connect(), await site.connect()
    for index, session in enumerate((first, other)):
        assert await collect(session, site, index) == ""
    assert len(set(site.copier.trainers)) == 2


async def test_a_shard_being_copied_is_neither_copied_again_nor_lent_nor_sent(
    copying: SameHostSession, site: Site
) -> None:
    other = await site.connect()
    assert (await refused(collect(copying, site, 1))).reason is Reason.SHARD_BUSY
    assert (await refused(asyncio.to_thread(copying.lend, 1))).reason is Reason.SHARD_BUSY
    assert (await refused(asyncio.to_thread(other.lend, 1))).reason is Reason.SHARD_BUSY
    assert (await refused(collect(other, site, 1))).reason is Reason.SHARD_BUSY
    assert (await refused(site.send(1))).reason is Reason.SHARD_BUSY
    written = asyncio.to_thread(copying.written, 1, b"".join(site.shards[1].digests))
    assert (await refused(written)).reason is Reason.REQUEST_INVALID
    assert (await refused(site.commit())).reason is Reason.PUSH_INCOMPLETE
    assert (site.copier.busy, site.received()[1]) == (1, 0)
    site.copier.gate.set()
    assert await asyncio.to_thread(copying.collected, 1) == b"".join(site.shards[1].digests)
    assert site.world.read(await site.commit()) == [shard.data for shard in site.shards]


async def test_what_was_copied_is_neither_copied_again_nor_lent(site: Site) -> None:
    session = await site.connect()
    await begun(session, site, 0)
    assert (await refused(collect(session, site, 0))).reason is Reason.OFFSET_MISMATCH
    assert (await refused(asyncio.to_thread(session.lend, 0))).reason is Reason.OFFSET_MISMATCH
    await begun(session, site, 1)
    assert site.world.read(await site.commit()) == [shard.data for shard in site.shards]


async def test_only_what_was_asked_for_on_this_connection_is_told(
    copying: SameHostSession, site: Site
) -> None:
    other = await site.connect()
    for index in (0, 1):
        error = await refused(asyncio.to_thread(other.collected, index))
        assert error.reason is Reason.REQUEST_INVALID
    site.copier.gate.set()
    await asyncio.to_thread(copying.collected, 1)


async def test_a_connection_that_ends_leaves_the_shard_only_when_nothing_is_written_any_more(
    copying: SameHostSession, site: Site
) -> None:
    copying.close()
    await asyncio.sleep(0.05)
    assert site.copier.busy == 1
    assert (await refused(site.send(1))).reason is Reason.SHARD_BUSY
    site.copier.gate.set()
    await until(lambda: not site.copier.busy)
    await asyncio.sleep(0.05)
    # What came although nobody wanted it any more does not count.
    assert site.received() == [len(site.shards[0].data), 0]
    await site.send(1)
    assert site.world.read(await site.commit()) == [shard.data for shard in site.shards]


@pytest.mark.parametrize("end", ["abort", "shutdown"])
async def test_memory_is_freed_only_when_nothing_is_written_there_any_more(
    copying: SameHostSession, site: Site, end: str
) -> None:
    pushes = site.world.pushes
    asked = asyncio.create_task(asyncio.to_thread(copying.collected, 1))
    await asyncio.sleep(0.05)
    ending = asyncio.create_task(
        pushes.close()
        if end == "shutdown"
        else pushes.abort(pb.AbortPushRequest(push_id=site.push_id))
    )
    await asyncio.sleep(0.05)
    assert not ending.done()
    assert [slot.state for slot in site.world.model.slots.status()].count("receiving") == 1
    site.copier.gate.set()
    await ending
    wanted = Reason.SHUTTING_DOWN if end == "shutdown" else Reason.PUSH_ABORTED
    assert (await refused(asked)).reason is wanted
    assert not site.copier.busy
    assert "receiving" not in [slot.state for slot in site.world.model.slots.status()]


async def test_a_push_that_ends_before_the_first_answer_tells_why(site: Site) -> None:
    session = await site.connect()
    site.copier.gate.clear()
    first = asyncio.create_task(collect(session, site, 0))
    await until(lambda: site.copier.busy == 1)
    ending = asyncio.create_task(site.world.pushes.abort(pb.AbortPushRequest(push_id=site.push_id)))
    await asyncio.sleep(0.05)
    site.copier.gate.set()
    await ending
    assert (await refused(first)).reason is Reason.PUSH_ABORTED


@pytest.mark.parametrize("reason", [Reason.FETCHER_FAILED, Reason.REQUEST_INVALID])
@pytest.mark.parametrize("first", [True, False])
async def test_what_fails_is_told_and_can_be_sent(site: Site, reason: Reason, first: bool) -> None:
    session = await site.connect()
    if not first:
        await begun(session, site, 0)
    site.copier.errors.append(WeightSyncError(reason, "the device failed; push again"))
    index = 0 if first else 1
    if first:
        error = await refused(collect(session, site, index))
    else:
        assert await collect(session, site, index) == ""
        error = await refused(asyncio.to_thread(session.collected, index))
    assert (error.reason, error.message) == (reason, "the device failed; push again")
    session.close()
    await until(lambda: not site.offers._pushes.find(site.push_id).state.streams)
    for rest in range(index, 2):
        await site.send(rest)
    assert site.world.read(await site.commit()) == [shard.data for shard in site.shards]


async def test_a_failure_that_nobody_asks_for_is_no_fault(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    session = await site.connect()
    await begun(session, site, 0)
    site.copier.errors.append(WeightSyncError(Reason.FETCHER_FAILED, "the device failed"))
    assert await collect(session, site, 1) == ""
    session.close()
    await until(lambda: not site.offers._pushes.find(site.push_id).state.streams)
    await site.send(1)
    assert site.world.read(await site.commit()) == [shard.data for shard in site.shards]
    assert "never retrieved" not in caplog.text


async def test_a_header_that_tells_another_layout_fails_the_push(site: Site) -> None:
    session = await site.connect()
    header = bytearray.fromhex(site.where(0)["header"])
    header[-5:-1] = b"    "
    error = await refused(collect(session, site, 0, header=header.hex()))
    assert error.reason is Reason.SHARD_INVALID
    assert (await refused(site.commit())).reason is Reason.SHARD_INVALID


HANDLE = "00" * HANDLE_BYTES


@pytest.mark.parametrize(
    "wrong",
    [
        {"header": ""},
        {"header": "no"},
        {"header": 7},
        {"header": None},
        {"header": "00" * 8},
        {"device": DEVICE[2:]},
        {"device": DEVICE.upper()},
        {"device": None},
        {"device": 7},
        {"handles": []},
        {"handles": {HANDLE: HANDLE}},
        {"handles": [HANDLE[2:]]},
        {"handles": [HANDLE.replace("00", "zz")]},
        {"handles": [None]},
        {"handles": [HANDLE] * 3},
        {"handles": HANDLE},
        {"places": []},
        {"places": None},
        {"places": "ab"},
        {"places": {"0": [0, 0], "1": [0, 0]}},
        {"places": [[0, 0]]},
        {"places": [[0, 0]] * 3},
        {"places": [[0, 0], [1, 0]]},
        {"places": [[0, 0], [-1, 0]]},
        {"places": [[0, 0], [0, -1]]},
        {"places": [[0, 0], [0, 1 << 63]]},
        {"places": [[0, 0], [0, 0.0]]},
        {"places": [[0, 0], [False, 0]]},
        {"places": [[0, 0], [0, True]]},
        {"places": [[0, 0], [0]]},
        {"places": [[0, 0], [0, 0, 0]]},
        {"places": [[0, 0], "00"]},
        {"places": [[0, 0], None]},
    ],
)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(
    site: Site, wrong: dict[str, Any]
) -> None:
    session = await site.connect()
    error = await refused(collect(session, site, 0, **wrong))
    assert error.reason is Reason.REQUEST_INVALID
    where = site.where(0)
    del where[next(iter(wrong))]
    error = await refused(asyncio.to_thread(session.collect, 0, where))
    assert error.reason is Reason.REQUEST_INVALID
    assert not site.copier.begun
    # Nobody has taken the shard for it.
    await site.send(0)
    assert await collect(session, site, 1) == ""
    assert site.world.read(await site.commit()) == [shard.data for shard in site.shards]


async def test_shards_that_were_not_told_of_are_refused(site: Site) -> None:
    session = await site.connect()
    for index in (2, -1, 1 << 70):
        for asked in (
            asyncio.to_thread(session.collect, index, site.where(0)),
            asyncio.to_thread(session.collected, index),
        ):
            assert (await refused(asked)).reason is Reason.REQUEST_INVALID
    fresh = site.offers.session(PeerCredentials(1, 2))
    error = await refused(asyncio.to_thread(fresh.collect, 0, site.where(0)))
    assert error.reason is Reason.REQUEST_INVALID


async def test_a_fault_of_ours_is_logged_and_told_as_one(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await site.connect()

    async def broken(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(site.copier, "collect", broken)
    assert (await refused(collect(session, site, 0))).reason is Reason.FAULT
    assert "RuntimeError: ours" in caplog.text
    assert site.world.model.table.name == MODEL
