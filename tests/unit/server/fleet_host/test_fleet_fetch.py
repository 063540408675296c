"""A version that a fleet goes to is looked for at once, also by a follower that has just failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.engine.plant import Engine, hurry, shards, until
from tests.unit.server.fleet_host.test_fleet_host import site
from tests.unit.server.world import MODEL, content, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_plan import FleetVersion
from weightsync_server.follow import follower
from weightsync_server.follow.follow_metrics import FollowMetrics
from weightsync_server.follow.follower import Follower
from weightsync_server.follow.store_origin import StoreOrigin
from weightsync_server.ops.metrics import Metrics
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
    it.host.on_missing = made.look
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
    async with site(tmp_path / "host", {"e": engine}) as it:
        await it.up()
        made = following(it, origin)
        made.start()
        try:
            await until(lambda: "is not followed for now" in caplog.text)
            await asyncio.to_thread(mend)
            await it.host.prepare(FleetVersion(2, content(shards(2))))
            await it.host.commit(FleetVersion(2, content(shards(2))))
            assert it.serves() == {2}
        finally:
            await made.stop()


async def test_a_version_that_is_nowhere_is_asked_for_once(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "segments.sock")
    asked: list[int] = []
    async with site(tmp_path, {"e": engine}) as it:
        await it.up()
        it.host.on_missing = lambda: asked.append(1)
        it.host._fetch_s = 0.3
        with pytest.raises(WeightSyncError) as caught:
            await it.host.prepare(FleetVersion(9, "9" * 32))
        assert caught.value.reason is Reason.VERSION_UNKNOWN
        with pytest.raises(WeightSyncError):
            await it.host.find(9)
        # What is here is asked for nowhere.
        assert await it.host.find(1) == it.version(1)
        assert asked == [1, 1]
