"""A follower that could never work is refused at the start; one whose origin is away is not."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.deltas.pushing import push_delta, sparse_history, until
from tests.unit.server.world import MODEL, content, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.metrics import Metrics
from weightsync_server.replicate.fetch_plan import Fetch, begin_request, push_key
from weightsync_server.replicate.replica_settings import ReplicaSettings
from weightsync_server.replicate.start_follower import Replica, start_follower

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.server.world import World


@contextlib.contextmanager
def free_bytes(here: World, size: int) -> Iterator[None]:
    """Leave so many bytes of disk to a world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here.model.store, "free_bytes", lambda: size)
        yield


def options(url: str) -> ReplicaSettings:
    return ReplicaSettings(url, 0.02)


async def test_none_is_started_where_none_is_followed(here: World) -> None:
    replica = Replica()
    async with contextlib.AsyncExitStack() as stack:
        await replica.start(options(""), here.model, here.pushes, Metrics(MODEL), stack)
    assert replica.follower is None


async def test_it_follows_until_it_is_stopped(origin: World, here: World) -> None:
    url = origin.model.store.url
    replica = Replica()
    async with contextlib.AsyncExitStack() as stack:
        await replica.start(options(url), here.model, here.pushes, Metrics(MODEL), stack)
        assert replica.follower is not None
        await origin.push(simple(1), 1)
        await until(lambda: here.model.table.newest == 1)
    assert here.model.table.get(1).content_digest == content(simple(1))


async def test_too_little_memory_is_refused(origin: World, tmp_path: Path) -> None:
    await origin.push(simple(1, size=100_000), 1)
    replica = Replica()
    async with world(tmp_path / "b", memory=1_000_000) as here:
        asked = options(origin.model.store.url), here.model, here.pushes, Metrics(MODEL)
        with pytest.raises(WeightSyncError, match=r"in 2 slots .* lower slots") as caught:
            await replica.start(*asked, contextlib.AsyncExitStack())
        assert caught.value.reason is Reason.MEMORY_EXHAUSTED
        assert replica.follower is None


async def test_too_little_disk_is_refused_unless_the_version_is_here(
    origin: World, here: World
) -> None:
    await origin.push(simple(1), 1)
    full, disk = options(origin.model.store.url), here.model.disk
    disk.floor_bytes = 1 << 60
    with pytest.raises(WeightSyncError, match="has room for 0; free space there") as caught:
        await start_follower(full, here.model, here.pushes, Metrics(MODEL))
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    disk.floor_bytes = 0
    await here.push(simple(1), 1)
    disk.floor_bytes = 1 << 60
    follower = await start_follower(full, here.model, here.pushes, Metrics(MODEL))
    assert follower is not None
    await follower.stop()


async def test_what_is_not_fetched_needs_no_room(origin: World, here: World) -> None:
    await origin.push(simple(1), 1)
    await here.push(simple(2), 2)
    full, here.model.disk.floor_bytes = options(origin.model.store.url), 1 << 60
    follower = await start_follower(full, here.model, here.pushes, Metrics(MODEL))
    assert follower is not None
    await follower.stop()


async def test_one_that_has_a_version_serves_it_on_where_the_next_has_no_room(
    origin: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await origin.push(simple(1, size=100_000), 2)
    async with world(tmp_path / "b", memory=1_000_000) as here:
        await here.push(simple(1), 1)
        asked = options(origin.model.store.url), here.model, here.pushes, Metrics(MODEL)
        follower = await start_follower(*asked)
        assert follower is not None
        assert "version 1 is still served: version 2 of" in caplog.text
        await follower.stop()


async def test_a_delta_needs_the_room_of_a_delta(
    origin: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, new = sparse_history(1)
    await origin.push(base, 1)
    async with world(tmp_path / "b") as here:
        await here.push(base, 1)
        await push_delta(origin, base, new, 2)
        commit = origin.model.table.get(2).commit
        assert commit is not None
        assert 2 * commit.delta_bytes < commit.size_bytes
        with free_bytes(here, 2 * commit.delta_bytes):
            asked = options(origin.model.store.url), here.model, here.pushes, Metrics(MODEL)
            follower = await start_follower(*asked)
        assert follower is not None
        assert caplog.text == ""
        await follower.stop()


async def test_what_was_fetched_before_a_restart_needs_no_room_again(
    origin: World, tmp_path: Path
) -> None:
    shards = simple(1)
    await origin.push(shards, 1)
    async with world(tmp_path / "b", identity="b") as here:
        wanted = Fetch(origin.model.table.get(1).commit, delta=False)  # type: ignore[arg-type]
        begun = await here.pushes.begin(begin_request(wanted, push_key(wanted)), None)
        await here.join(begun.push_id, shards[0].all())
        await until(lambda: bool(here.fetchers.persisted))  # type: ignore[attr-defined]
    async with world(tmp_path / "b", identity="b") as here:
        with free_bytes(here, len(shards[1].data)):
            asked = options(origin.model.store.url), here.model, here.pushes, Metrics(MODEL)
            follower = await start_follower(*asked)
        assert follower is not None
        await until(lambda: here.model.table.newest == 1)
        await follower.stop()


async def test_a_server_that_is_away_is_waited_for(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metrics = Metrics(MODEL)
    await here.push(simple(1), 3)
    url = f"grpc://127.0.0.1:{port}"
    follower = await start_follower(options(url), here.model, here.pushes, metrics)
    assert follower is not None
    assert f"{url} does not answer" in caplog.text
    assert "version 3, which it has, is served" in caplog.text
    value = metrics.registry.get_sample_value("weightsync_follow_origin_up", {"model": MODEL})
    assert value == 0
    await follower.stop()


async def test_files_for_tls_are_read_at_once(here: World, tmp_path: Path) -> None:
    wrong = replace(options("grpcs://127.0.0.1:1"), ca=tmp_path / "none")
    with pytest.raises(WeightSyncError, match=r"the origin's CA .*none cannot be read") as caught:
        await start_follower(wrong, here.model, here.pushes, Metrics(MODEL))
    assert caught.value.reason is Reason.REQUEST_INVALID
