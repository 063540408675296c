"""A follower's own checkpoint: its number in the origin, or one that nobody else gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.deltas.pushing import push_delta, sparse_history, until
from tests.unit.server.replicate.conftest import following
from tests.unit.server.world import MODEL, Threads, begin, content, make_shard, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import local_number
from weightsync_server.ops.metrics import Metrics
from weightsync_server.replicate.follower import Follower, FollowMetrics
from weightsync_server.replicate.start_follower import Replica
from weightsync_server.replicate.store_source import StoreOrigin
from weightsync_server.residency import adoption
from weightsync_server.store import open_reader

if TYPE_CHECKING:
    from tests.unit.server.conftest import Offered
    from tests.unit.server.world import World


async def test_content_of_the_origin_has_its_number_and_metadata(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    await origin.push(simple(1), 4, metadata={"step": "1"})
    await origin.push(simple(2), 5)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(5))
        assert not there.has(4)
        record = await there.here.model.adoption.adopt(offered(simple(1)), 0)
        assert (record.version, record.metadata) == (4, {"step": "1"})
        # One that came already is that version.
        assert (await there.here.model.adoption.adopt(offered(simple(2)), 0)).version == 5


async def test_what_follows_a_checkpoint_in_other_files_has_the_digests_of_the_origin(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    base, new = sparse_history(1)
    await origin.push(base, 1)
    tensors = [
        (e.name, e.dtype, e.shape, s.data[8 + s.header_size :][e.begin : e.end])
        for s in base
        for e in s.entries
    ]
    async with world(tmp_path / "b") as here:
        # As if it had been adopted while version 1 was the newest.
        adopted = await here.model.adoption.adopt(offered([make_shard(0, tensors)]), 0)
        assert adopted.version == 1
    await push_delta(origin, base, new, 2)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(2))
        ours, theirs = (w.model.table.get(2).commit for w in (there.here, origin))
        assert ours is not None
        assert theirs is not None
        assert ours.manifest_digest == theirs.manifest_digest
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="full") == 1)


async def test_other_content_takes_no_number_of_the_origin_and_is_older_than_all(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    async with following(tmp_path / "b", origin.model.store.url) as there:
        table = there.here.model.table
        record = await there.here.model.adoption.adopt(offered(simple(9)), 0)
        assert record.version == local_number(content(simple(9)))
        assert record.local
        assert (table.newest, table.highest) == (0, 0)
        assert table.newest_applicable() is record
        await origin.push(simple(1), 1)
        await until(lambda: there.has(1))
        assert (table.newest, table.highest, table.next_version()) == (1, 1, 2)
        assert table.newest_applicable().version == 1
        assert record.order < table.get(1).order
        # Nor does its number count when it is gone.
        await there.here.model.collector.delete(record.version)
        assert (table.highest, there.here.model.pins.highest) == (1, 0)
        await origin.push(simple(2), 2)
        await until(lambda: there.has(2))


async def test_what_this_host_alone_has_is_no_base_of_what_the_origin_has(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    versions = sparse_history(1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        own = await there.here.model.adoption.adopt(offered(versions[0]), 0)
        assert own.version == local_number(content(versions[0]))
        await origin.push(versions[0], 1)
        await until(lambda: there.has(1))
        await push_delta(origin, versions[0], versions[1], 2)
        await until(lambda: there.has(2))
        commit = there.here.model.table.get(2).commit
        assert commit is not None
        assert commit.base_version == 1
        # Adopted once more it is the one that everybody has.
        assert (await there.here.model.adoption.adopt(offered(versions[0]), 0)).version == 1


async def test_local_content_means_the_same_on_every_host_and_goes_no_further(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    async with following(tmp_path / "b", origin.model.store.url) as first:
        mine = await first.here.model.adoption.adopt(offered(simple(9)), 0)
        async with following(tmp_path / "c", first.here.model.store.url) as second:
            await origin.push(simple(1), 1)
            await until(lambda: second.has(1))
            assert [record.version for record in second.here.model.table.list()] == [1]
            theirs = await second.here.model.adoption.adopt(offered(simple(9)), 0)
            assert theirs.version == mine.version
            other = await second.here.model.adoption.adopt(offered(simple(8)), 0)
            assert other.version != mine.version


async def test_content_whose_number_means_other_content_here_stays_local(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    """As after the origin was begun anew: the engine starts all the same, and at once."""
    async with world(tmp_path / "b") as here:
        await here.push(simple(2), 1)
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        record = await there.here.model.adoption.adopt(offered(simple(1)), 0)
        assert record.version == local_number(content(simple(1)))
        assert there.has(1, content(simple(2)))


async def test_a_number_that_does_not_come_in_is_waited_for_no_longer_than_it_may(
    origin: World, tmp_path: Path, offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "_ARRIVAL_WAIT_S", 0.1)
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", f"file://{tmp_path}/nothing") as there:
        found = (await origin.model.store.committed("m"))[0]  # type: ignore[attr-defined]  # of a folder

        async def find(_: str) -> object:
            return found

        there.follower.find = find  # type: ignore[method-assign, assignment]  # at this very moment
        begun = await there.here.pushes.begin(begin(version=1), None)
        await there.here.join(begun.push_id, [m for shard in simple(1) for m in shard.all()])
        stored = Path(there.here.model.store.shard_path(MODEL, 1, 0) or "")
        await until(stored.exists)
        with pytest.raises(WeightSyncError, match="retry when it has arrived") as caught:
            await there.here.model.adoption.adopt(offered(simple(1)), 0)
        assert caught.value.reason is Reason.PUSH_ABORTED
        # What came of it is left alone.
        commit = pb.CommitPushRequest(push_id=begun.push_id, content_digest=content(simple(1)))
        assert (await there.here.pushes.commit(commit)).version == 1


async def test_a_checkpoint_that_is_being_fetched_is_that_version(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    fetchers = Threads()
    fetchers.gate = asyncio.Event()
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url, fetchers=fetchers) as there:
        await until(lambda: bool(there.here.pushes.status()))
        adopting = asyncio.create_task(there.here.model.adoption.adopt(offered(simple(1)), 0))
        await asyncio.sleep(0.2)
        assert not adopting.done()
        fetchers.gate.set()
        record = await adopting
        assert record is there.here.model.table.get(1)
        assert there.here.read(1) == [shard.data for shard in simple(1)]
        assert there.metric("weightsync_follow_failures_total") == 0


async def test_a_version_that_a_checkpoint_becomes_is_not_fetched(
    origin: World, tmp_path: Path, offered: Offered, caplog: pytest.LogCaptureFixture
) -> None:
    fetchers = Threads()
    fetchers.gate = asyncio.Event()
    await origin.push(simple(1), 1)
    replica = Replica()
    async with world(tmp_path / "b", fetchers=fetchers, origin=lambda: replica.follower) as here:
        metrics = Metrics(MODEL)
        source = StoreOrigin(open_reader(origin.model.store.url), MODEL, 0.02, here.meters)
        follower = Follower(source, here.model, here.pushes, FollowMetrics(metrics))
        replica.follower = follower
        adopting = asyncio.create_task(here.model.adoption.adopt(offered(simple(1)), 0))
        await until(lambda: here.model.table.find(1) is not None)
        follower.start()
        await asyncio.sleep(0.2)
        fetchers.gate.set()
        record = await adopting
        assert record.version == 1
        assert record.commit is not None
        assert record.commit.adopted
        await origin.push(simple(2), 2)
        await until(lambda: here.model.table.newest == 2)
        await follower.stop()
        assert "no version can be fetched" not in caplog.text
        assert here.meters.pushes == {"committed": 1}


async def test_updates_of_a_trainer_at_the_engine_are_refused(
    origin: World, tmp_path: Path, offered: Offered
) -> None:
    async with following(tmp_path / "b", origin.model.store.url) as there:
        model = there.here.model
        with pytest.raises(WeightSyncError, match="takes no updates") as caught:
            await model.adoption.receive(offered(simple(3)), {}, model.accepted)
        assert caught.value.reason is Reason.SERVER_FOLLOWS
        assert model.table.list() == []
