"""A follower whose shards come through a cache that anybody may write to."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.shard_cache import UnaskedCache, unasked_cache
from tests.support.versions import make_version
from tests.support.xxh3_forgery import BLOCK, forge_block
from tests.unit.server.deltas.pushing import push_delta, sparse_history, until
from tests.unit.server.replicate.conftest import following
from tests.unit.server.world import World, content, real_fetchers, simple, world
from weightsync import clock
from weightsync.model.digest import tensor_digest
from weightsync_server.store import open_reader, open_store
from weightsync_server.store.objects import shard_transfer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.object_servers import ObjectServer
    from weightsync_server.workers.fetch.fetch_pool import FetcherPool


@pytest.fixture
def cache(s3: ObjectServer) -> Iterator[UnaskedCache]:
    with unasked_cache(s3.port) as made:
        yield made


@pytest.fixture
async def fetchers() -> AsyncIterator[FetcherPool]:
    async with real_fetchers() as pool:
        yield pool


@pytest.fixture
async def pushed(bucket: str, tmp_path: Path, fetchers: FetcherPool) -> AsyncIterator[World]:
    """Return an origin whose store the cache stands before."""
    async with world(tmp_path / "a", store=bucket, identity="a", fetchers=fetchers) as made:
        yield made


async def test_shards_come_from_the_cache_also_those_of_deltas(
    pushed: World, cache: UnaskedCache, bucket: str, tmp_path: Path, fetchers: FetcherPool
) -> None:
    versions = sparse_history(2)
    await pushed.push(versions[0], 1)
    async with following(
        tmp_path / "b", bucket, fetchers=fetchers, cache=cache.url(bucket)
    ) as there:
        await until(lambda: there.has(1))
        await push_delta(pushed, versions[0], versions[1], 2)
        await until(lambda: there.has(2))
        assert there.here.read(2) == [shard.data for shard in versions[1]]
        await until(lambda: there.metric("weightsync_follow_fetched_total", form="delta") == 1)
        asked = {path.rsplit("/", 2)[1] for path in cache.asked}
        assert asked == {"shards"}
        right = there.metric("weightsync_follow_cache_pieces_total", outcome="right")
        assert right == len(cache.asked) == 2 * len(versions[0])


async def test_weights_with_the_same_xxh3_are_not_taken_for_those_that_were_pushed(
    pushed: World,
    cache: UnaskedCache,
    bucket: str,
    tmp_path: Path,
    fetchers: FetcherPool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shards = simple(1)

    def lie(data: bytes) -> bytes:
        (shard,) = (one for one in shards if one.data == data)
        (entry,) = (one for one in shard.entries if one.end - one.begin > BLOCK)
        at = 8 + shard.header_size + entry.begin
        forged = data[:at] + forge_block(data[at : at + BLOCK], bytes(100)) + data[at + BLOCK :]
        end = 8 + shard.header_size + entry.end
        # All that the manifest tells of the tensor holds for what is given out.
        assert forged != data
        assert tensor_digest(forged[at:end]) == tensor_digest(data[at:end])
        return forged

    cache.change = lie
    await pushed.push(shards, 1)
    async with following(
        tmp_path / "b", bucket, fetchers=fetchers, cache=cache.url(bucket)
    ) as there:
        await until(lambda: there.has(1, content(shards)))
        assert there.here.read(1) == [shard.data for shard in shards]
        wrong = there.metric("weightsync_follow_cache_pieces_total", outcome="wrong")
        assert wrong == len(shards)
        assert "the cache returned different bytes than were stored" in caplog.text


async def test_a_cache_that_does_not_answer_is_left_alone_for_a_while(
    pushed: World,
    cache: UnaskedCache,
    bucket: str,
    tmp_path: Path,
    fetchers: FetcherPool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def hang_up(_: bytes) -> bytes:
        raise ConnectionError

    cache.change = hang_up
    await pushed.push(simple(1), 1)
    async with following(
        tmp_path / "b", bucket, fetchers=fetchers, cache=cache.url(bucket)
    ) as there:
        await until(lambda: there.has(1))
        asked = len(cache.asked)
        assert asked
        cache.change = lambda data: data
        await pushed.push(simple(2), 2)
        await until(lambda: there.has(2))
        assert len(cache.asked) == asked
        missing = there.metric("weightsync_follow_cache_pieces_total", outcome="missing")
        assert missing == 2 * len(simple(1))
        assert caplog.text.count("the cache did not answer") == 1
        later = time.monotonic
        monkeypatch.setattr(clock, "monotonic", lambda: later() + 31)
        await pushed.push(simple(3), 3)
        await until(lambda: there.has(3))
        right = there.metric("weightsync_follow_cache_pieces_total", outcome="right")
        assert right == len(cache.asked) - asked == len(simple(3))


async def test_what_has_no_digests_of_pieces_is_not_read_through_a_cache(
    cache: UnaskedCache,
    bucket: str,
    tmp_path: Path,
    fetchers: FetcherPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an earlier release wrote it."""
    store = open_store(bucket, "old")
    await store.open()
    monkeypatch.setattr(shard_transfer, "_digests", lambda *_: None)
    made = make_version(1)
    await asyncio.to_thread(made.write, store)
    await store.commit(made.record, made.manifest)
    async with following(
        tmp_path / "b", bucket, fetchers=fetchers, cache=cache.url(bucket)
    ) as there:
        await until(lambda: there.has(1, made.record.content_digest))
        assert not cache.asked


async def test_a_version_that_is_kept_in_full_afterwards_has_digests_too(bucket: str) -> None:
    store = open_store(bucket, "a")
    await store.open()
    base, made = make_version(1), make_version(2)
    await asyncio.to_thread(base.write, store)
    await store.commit(base.record, base.manifest)
    kept = make_version(
        2,
        delta_bytes=sum(map(len, made.shards)),
        base_version=1,
        base_content_digest=base.record.content_digest,
    )
    for index, data in enumerate(kept.shards):
        place = store.shard_path("m", 2, index, delta=True) or ""
        await asyncio.to_thread(shard_transfer.upload, memoryview(data), place, lambda: None)
    await store.commit(kept.record, kept.manifest, kept.manifest)
    for index, data in enumerate(made.shards):
        place = store.shard_path("m", 2, index) or ""
        await asyncio.to_thread(shard_transfer.upload, memoryview(data), place, lambda: None)
    await store.fold(made.record, made.manifest)
    reader = open_reader(bucket)
    assert [record.base_version for record in await reader.committed("m")] == [0, 0]
    for index, data in enumerate(made.shards):
        pieces = reader.pieces("m", 2, index)
        assert pieces is not None
        assert pieces.cover(len(data))
