"""What a follower has is what its origin committed, proved; what is wrong there becomes nothing."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.deltas.pushing import history, push_chain, push_delta, until
from tests.unit.server.replicate.conftest import following
from tests.unit.server.world import MODEL, content, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.replicate import follower
from weightsync_server.replicate.store_source import StoreOrigin
from weightsync_server.store.local.local_store import LocalStore
from weightsync_server.store.store_records import read_document, write_document

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.server.world import World


def shard_path(origin: World, version: int, shard: int = 0, *, delta: bool = False) -> Path:
    return Path(origin.model.store.shard_path(MODEL, version, shard, delta=delta) or "")


def flipped(path: Path) -> Callable[[], object]:
    """Damage the last byte of a file; return what mends it."""
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    return lambda: path.write_bytes(good)


async def test_a_version_comes_with_its_number_digests_parent_and_metadata(
    origin: World, tmp_path: Path
) -> None:
    versions = history(2)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await origin.push(versions[0], 7, metadata={"step": "1"})
        await until(lambda: there.has(7))
        await push_delta(origin, versions[0], versions[1], 9, metadata={"step": "2"})
        await push_delta(origin, versions[1], versions[2], 10)
        await until(lambda: there.has(10))
        for number, shards in zip((7, 9, 10), versions, strict=True):
            theirs, ours = (w.model.table.get(number) for w in (origin, there.here))
            assert theirs.commit is not None
            assert ours.commit is not None
            for field in (
                "content_digest",
                "manifest_digest",
                "layout_digest",
                "metadata",
                "base_version",
                "base_content_digest",
                "trainer_verified",
                "changed_elements",
            ):
                assert getattr(ours.commit, field) == getattr(theirs.commit, field), field
            assert ours.commit.content_digest == content(shards)
        assert there.here.read(10) == [shard.data for shard in versions[2]]
        await until(lambda: there.metric("weightsync_follow_lag_versions") == 0)


async def test_a_long_chain_is_read_in_full_and_nothing_of_it_is_kept_as_versions(
    origin: World, tmp_path: Path
) -> None:
    versions = history(12)
    await push_chain(origin, versions)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(13))
        assert [record.version for record in there.here.model.table.list()] == [13]
        assert there.here.read(13) == [shard.data for shard in versions[12]]
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="full") == 1)
        assert there.metric("weightsync_follow_fetched_total", form="delta") == 0
        # Each stored byte of the chain was read once.
        records = [record.commit for record in origin.model.table.list()]
        assert there.here.meters.received == sum(one.stored_bytes for one in records if one)


async def test_a_short_chain_is_followed_delta_by_delta(origin: World, tmp_path: Path) -> None:
    versions = history(6)
    await push_chain(origin, versions[:2])
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(2))
    for at in range(2, 7):
        await push_delta(origin, versions[at - 1], versions[at], at + 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(7))
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="delta") == 5)
        record = there.here.model.table.get(7)
        assert record.residency == pb.RESIDENCY_STAGED
        assert there.here.read(7) == [shard.data for shard in versions[6]]


async def test_the_newest_is_staged_again_after_a_restart_without_the_origin(
    origin: World, tmp_path: Path
) -> None:
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
    async with following(tmp_path / "b", f"file://{tmp_path}/nothing") as there:
        record = there.here.model.table.get(1)
        await until(lambda: record.residency == pb.RESIDENCY_STAGED)
        assert there.metric("weightsync_follow_origin_up") == 0
        await until(lambda: there.metric("weightsync_follow_failures_total") >= 1)


@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
async def test_damaged_bytes_become_no_version_and_are_tried_again(
    origin: World, tmp_path: Path, *, delta: bool
) -> None:
    versions = history(1)
    await origin.push(versions[0], 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
    if delta:
        await push_delta(origin, versions[0], versions[1], 2)
    else:
        await origin.push(versions[1], 2)
    mend = flipped(shard_path(origin, 2, delta=delta))
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.metric("weightsync_follow_failures_total") > 2)
        assert not there.has(2)
        assert there.metric("weightsync_follow_lag_versions") == 1
        await asyncio.to_thread(mend)
        await until(lambda: there.has(2, content(versions[1])))
        assert there.here.read(2) == [shard.data for shard in versions[1]]


async def test_a_delta_of_the_chain_that_is_damaged_is_found_before_it_is_applied(
    origin: World, tmp_path: Path
) -> None:
    versions = history(3)
    await push_chain(origin, versions)
    mend = flipped(shard_path(origin, 2, delta=True))
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.metric("weightsync_follow_failures_total") > 1)
        assert there.here.model.table.list() == []
        await asyncio.to_thread(mend)
        await until(lambda: there.has(4, content(versions[3])))
        assert there.here.read(4) == [shard.data for shard in versions[3]]


async def test_a_delta_in_the_place_of_another_is_refused(
    origin: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    versions = history(3)
    await push_chain(origin, versions)
    # Whole, and of this layout: only what it changes tells that it is another one's.
    records = []
    for number in (3, 4):
        record = shard_path(origin, number, delta=True).with_name("commit.json")
        records.append(read_document(record))
    for name in ("delta-0.safetensors", "delta-1.safetensors", "delta.json"):
        ours, theirs = (shard_path(origin, number, delta=True).with_name(name) for number in (3, 4))
        ours.write_bytes(theirs.read_bytes())
    of_delta = {key: value for key, value in records[1].items() if key.startswith("delta_")}
    write_document(ours.with_name("commit.json"), records[0] | of_delta)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.metric("weightsync_follow_failures_total") > 1)
        assert there.here.model.table.list() == []
    assert "the delta of version 3" in caplog.text
    assert "its record says" in caplog.text


async def test_retention_bounds_what_a_follower_keeps(origin: World, tmp_path: Path) -> None:
    retention = Retention(versions=2)
    async with following(tmp_path / "b", origin.model.store.url, retention=retention) as there:
        for number in range(1, 7):
            await origin.push(simple(number), number)
            await until(partial(there.has, number))
        await until(lambda: len(there.here.model.table.list()) == 2)
        assert [record.version for record in there.here.model.table.list()] == [6, 5]


async def test_what_is_deleted_in_the_origin_stays_here(origin: World, tmp_path: Path) -> None:
    async with following(tmp_path / "b", origin.model.store.url) as there:
        for number in (1, 2):
            await origin.push(simple(number), number)
            await until(partial(there.has, number))
        there.here.model.serving.engine("here").set_live(2)
        await origin.model.collector.delete(2)
        await origin.push(simple(3), 3)
        await until(lambda: there.has(3))
        assert there.has(2, content(simple(2)))


async def test_a_number_with_other_content_here_is_told_and_never_replaced(
    origin: World, tmp_path: Path
) -> None:
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", f"file://{tmp_path}/nothing") as there:
        await there.here.push(simple(2), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.metric("weightsync_follow_failures_total") > 0)
        assert there.has(1, content(simple(2)))
        # What comes after it is followed.
        await origin.push(simple(3), 2)
        await until(lambda: there.has(2, content(simple(3))))


async def test_an_origin_that_was_begun_anew_is_told(
    origin: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(tmp_path / "b", f"file://{tmp_path}/nothing") as there:
        await there.here.push(simple(1), 9)
    await origin.push(simple(2), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.metric("weightsync_follow_failures_total") > 0)
        assert [record.version for record in there.here.model.table.list()] == [9]
    assert "none of which are here, but numbers up to 9 were used here" in caplog.text


async def test_what_was_deleted_in_the_origin_is_no_new_beginning(
    origin: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is here may be the only copy that is left."""
    for number in (1, 2, 3):
        await origin.push(simple(number), number)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(3))
        await origin.model.collector.delete(3)
        await until(lambda: "nothing is fetched until a version above 3 exists" in caplog.text)
        assert "--state-dir" not in caplog.text
        assert there.metric("weightsync_follow_failures_total") == 0
        assert there.has(3, content(simple(3)))


async def test_what_was_deleted_here_is_no_new_beginning(
    origin: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await origin.push(simple(1), 1)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: there.has(1))
        await there.here.model.collector.delete(1)
        await origin.push(simple(2), 2)
        await until(lambda: there.has(2))
        await there.here.model.collector.delete(2)
        # Seen again, as after a restart.
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: "none of which are here" in caplog.text)
        assert "started over" not in caplog.text
        assert there.metric("weightsync_follow_failures_total") == 0


async def test_a_fetch_that_nobody_wants_any_more_gives_its_memory_back(
    origin: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: object) -> None:
        raise WeightSyncError(Reason.FETCHER_FAILED, "a fetcher died")

    await origin.push(simple(1), 1)
    await origin.push(simple(2), 2)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        pushes = there.here.pushes
        # Of a failure that passes the push stays open, for the next try.
        monkeypatch.setattr(there.here.fetchers, "load", failing)
        await until(lambda: bool(pushes.status()))
        await origin.model.collector.delete(2)
        await origin.model.collector.delete(1)
        await until(lambda: not pushes.status())
        assert there.here.model.table.list() == []


async def test_an_epoch_of_the_origin_is_an_epoch_here(origin: World, tmp_path: Path) -> None:
    assert await origin.model.epochs.acquire("trainer") == 1
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await origin.push(simple(1), 1)
        await until(lambda: there.has(1))
        assert there.here.model.table.get(1).epoch == 1
        assert await origin.model.epochs.acquire("another") == 2
        await origin.push(simple(2), 2)
        await until(lambda: there.has(2))
        assert there.here.model.epochs.newest == 2
    async with world(tmp_path / "b") as here:
        # As an origin it goes on from there.
        assert await here.model.epochs.acquire("another") == 3
        assert await here.push(simple(3)) == 3


async def test_a_content_has_its_number_in_the_origin(origin: World, tmp_path: Path) -> None:
    await origin.push(simple(1), 4)
    await origin.push(simple(1), 6)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        found = await there.follower.find(content(simple(1)))
        assert found is not None
        assert found.version == 6
        assert await there.follower.find("0" * 32) is None
    async with following(tmp_path / "c", f"file://{tmp_path}/nothing") as there:
        assert await there.follower.find(content(simple(1))) is None


async def test_content_that_comes_again_comes_with_its_new_number(
    origin: World, tmp_path: Path
) -> None:
    async with following(tmp_path / "b", origin.model.store.url) as there:
        for version, seed in ((7, 1), (8, 2), (9, 1)):
            await origin.push(simple(seed), version)
            await until(lambda: there.has(version, content(simple(seed))))  # noqa: B023 - awaited here


async def test_what_goes_wrong_while_it_waits_ends_nothing(
    origin: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, failures = StoreOrigin.changed, [OSError(5, "Input/output error")]

    async def fail_once(self: StoreOrigin) -> None:
        if failures:
            raise failures.pop()
        await changed(self)

    monkeypatch.setattr(StoreOrigin, "changed", fail_once)
    async with following(tmp_path / "b", origin.model.store.url) as there:
        await until(lambda: not failures)
        await origin.push(simple(1), 3)
        await until(lambda: there.has(3))


async def test_a_mount_that_hangs_holds_up_nobody(
    origin: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread cannot be ended, and is not waited for."""
    await origin.push(simple(1), 4)
    hangs, goes_on = threading.Event(), threading.Event()
    read = LocalStore._versions

    def hang(*args: Any) -> Any:
        if hangs.is_set():
            goes_on.wait()
        return read(*args)

    monkeypatch.setattr(LocalStore, "_versions", hang)
    try:
        async with following(tmp_path / "b", origin.model.store.url) as there:
            await until(lambda: there.has(4))
            hangs.set()
            monkeypatch.setattr(follower, "_FIND_S", 0.1)
            assert await there.follower.find(content(simple(1))) is None
            await there.follower.stop()
            assert not goes_on.is_set()
    finally:
        goes_on.set()
