"""A version that a fleet goes to is looked for at once, also by a follower that has just failed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, hurry, shards, until
from tests.unit.server.fleet_host.test_fleet_host import serving
from tests.unit.server.world import MODEL, content, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import FleetVersion
from weightsync_server.ops.metrics import Metrics
from weightsync_server.replicate import follower
from weightsync_server.replicate.follower import Follower, FollowMetrics
from weightsync_server.replicate.store_source import StoreOrigin
from weightsync_server.store import open_reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.unit.server.fleet_host.test_fleet_host import Site
    from tests.unit.server.world import World


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path / "origin") as made:
        yield made


def damage(path: Path) -> Callable[[], object]:
    """Damage a file; return what mends it."""
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    return lambda: path.write_bytes(good)


def following(it: Site, origin: World) -> Follower:
    """Return a follower as the server makes it in a fleet."""
    here, store = (
        it.here,
        StoreOrigin(open_reader(origin.model.store.url), MODEL, 0.02, Metrics(MODEL)),
    )
    made = Follower(store, here.model, here.pushes, FollowMetrics(Metrics(MODEL)))
    it.follower = made
    it.host._fetch_s = 15
    return made


async def test_a_follower_in_back_off_is_woken(
    tmp_path: Path, origin: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hurry(monkeypatch)
    # Nobody who waits for it would see the next try.
    monkeypatch.setattr(follower, "_AGAIN_S", 3600.0)
    await origin.push(shards(2), 2)
    mend = damage(Path(origin.model.store.shard_path(MODEL, 2, 0) or ""))
    (tmp_path / "host").mkdir()
    engine = Engine(tmp_path / "host" / "segments.sock")
    async with serving(tmp_path / "host", {"e": engine}) as it:
        made = following(it, origin)
        made.start()
        try:
            await until(lambda: "no version can be fetched" in caplog.text)
            await asyncio.to_thread(mend)
            await it.host.prepare(FleetVersion(2, content(shards(2))))
            await it.host.commit(FleetVersion(2, content(shards(2))))
            assert it.serves() == {2}
        finally:
            await made.stop()


@contextlib.asynccontextmanager
async def one_that_follows(folder: Path, origin: World) -> AsyncIterator[tuple[Site, Follower]]:
    """A host that serves version 1 and follows the origin."""
    await asyncio.to_thread(folder.mkdir)
    async with serving(folder, {"e": Engine(folder / "segments.sock")}) as it:
        made = following(it, origin)
        made.start()
        try:
            yield it, made
        finally:
            await made.stop()


async def test_what_is_older_than_the_newest_is_fetched_when_the_fleet_goes_there(
    tmp_path: Path, origin: World
) -> None:
    for number in (2, 3, 4):
        await origin.push(shards(number), number)
    async with one_that_follows(tmp_path / "host", origin) as (it, _):
        table = it.here.model.table
        await until(lambda: table.newest == 4)
        assert table.find(3) is None
        await it.host.prepare(FleetVersion(3, content(shards(3))))
        await it.host.commit(FleetVersion(3, content(shards(3))))
        assert it.serves() == {3}
        # By its number alone, as where an apply begins.
        assert await it.host.find(2) == FleetVersion(2, content(shards(2)))
        assert [record.version for record in table.list()] == [4, 3, 2, 1]
        assert (table.newest, table.highest) == (4, 4)


async def test_one_that_the_origin_lacks_is_refused_at_once_in_a_true_sentence(
    tmp_path: Path, origin: World
) -> None:
    await origin.push(shards(2), 2)
    async with one_that_follows(tmp_path / "host", origin) as (it, made):
        await until(lambda: it.here.model.table.newest == 2)
        it.host._fetch_s = 3600.0
        with pytest.raises(WeightSyncError, match=f"nor in {made.url}: the newest there is 2") as e:
            await it.host.find(9)
        assert e.value.reason is Reason.VERSION_UNKNOWN
        assert e.value.metadata["newest_version"] == "2"
        with pytest.raises(WeightSyncError, match="version 9 is neither on this host nor in"):
            await it.host.prepare(FleetVersion(9, "9" * 32))
        with pytest.raises(WeightSyncError, match=f"but {'9' * 32} is wanted") as e:
            await it.host.prepare(FleetVersion(2, "9" * 32))
        assert e.value.reason is Reason.VERSION_UNKNOWN
        assert it.serves() == {1}


async def test_one_that_does_not_come_is_waited_for_as_long_as_it_may(
    tmp_path: Path, origin: World
) -> None:
    await origin.push(shards(2), 2)
    damage(Path(origin.model.store.shard_path(MODEL, 2, 0) or ""))
    await origin.push(shards(3), 3)
    async with one_that_follows(tmp_path / "host", origin) as (it, made):
        it.host._fetch_s = 0.3
        with pytest.raises(WeightSyncError, match=f"has not arrived from {made.url} in 0.3 s") as e:
            await it.host.prepare(FleetVersion(2, content(shards(2))))
        assert e.value.reason is Reason.VERSION_UNKNOWN
        with pytest.raises(WeightSyncError, match="has not arrived from"):
            await it.host.find(2)
        # What is wrong in one keeps nobody from the newest.
        await until(lambda: it.here.model.table.newest == 3)
        assert it.here.model.table.find(2) is None


async def test_what_is_expected_is_fetched_before_it_is_asked_for(
    tmp_path: Path, origin: World
) -> None:
    for number in (2, 3, 4):
        await origin.push(shards(number), number)
    async with one_that_follows(tmp_path / "host", origin) as (it, made):
        table = it.here.model.table
        await until(lambda: table.newest == 4)
        it.host.expect(FleetVersion(3, content(shards(3))))
        await until(lambda: table.find(3) is not None and table.get(3).commit is not None)
        # One at a time, and none when the apply has ended.
        it.host.expect(FleetVersion(2, content(shards(2))))
        it.host.expect(FleetVersion(2, content(shards(2))))
        assert len(made._wanted) == 1
        it.host.expect(None)
        assert made._wanted == []
        it.host.expect(FleetVersion(4, content(shards(4))))
        assert made._wanted == []
        assert it.serves() == {1}


async def test_who_follows_nothing_says_what_to_do(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "segments.sock")
    async with serving(tmp_path, {"e": engine}) as it:
        with pytest.raises(WeightSyncError, match="start this server with --follow") as caught:
            await it.host.prepare(FleetVersion(9, "9" * 32))
        assert caught.value.reason is Reason.VERSION_UNKNOWN
        with pytest.raises(WeightSyncError, match="has no version 9: the newest is 1"):
            await it.host.find(9)
        assert await it.host.find(1) == it.version(1)
