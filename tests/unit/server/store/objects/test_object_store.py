"""What a store in a bucket does beyond what every store does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.object_proxy import Fault, object_proxy
from tests.support.proxy import FaultProxy
from tests.support.versions import Version, make_version, put_shard
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store import open_store
from weightsync_server.store.objects import (
    model_objects,
    object_catalog,
    object_client,
    shard_transfer,
)
from weightsync_server.store.objects.object_client import ObjectClient
from weightsync_server.store.objects.object_fences import Floor, ObjectFence
from weightsync_server.store.objects.object_keys import MARKER, is_receipt
from weightsync_server.store.objects.shard_transfer import download, upload
from weightsync_server.store.protocol import MODEL_NAME
from weightsync_server.store.store_records import PushRecord, encode_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.support.object_servers import ObjectServer
    from weightsync_server.store.protocol import Store


async def opened(url: str, server: str = "a") -> Store:
    store = open_store(url, server)
    await store.open()
    return store


async def committed(store: Store, version: int = 1, **facts: Any) -> Version:
    made = make_version(version, **facts)
    await asyncio.to_thread(made.write, store)
    await store.commit(made.record, made.manifest)
    return made


async def versions(url: str) -> list[int]:
    return [record.version for record in await open_store(url, "reader").open()]


async def keys(url: str, under: str = "m") -> set[str]:
    return set(await ObjectClient(url).list_under(under))


def loaded(store: Store, version: Version) -> list[bytes]:
    record = version.record
    found = []
    for index, data in enumerate(version.shards):
        view = bytearray(len(data))
        place = store.shard_path(record.model, record.version, index) or ""
        download(place, memoryview(view), lambda: None)
        found.append(bytes(view))
    return found


async def test_another_server_finds_what_one_has_committed(bucket: str) -> None:
    first = await opened(bucket, "a")
    await first.write_epoch("m", 3)
    one, two = await committed(first, 1, epoch=3), await committed(first, 2, epoch=3)
    await first.write_marks("m", {"pinned": [1]})
    second = open_store(bucket, "b")
    assert await second.open() == [one.record, two.record]
    assert not second.lost
    assert await second.read_epoch("m") == 3
    assert await second.read_marks("m") == {"pinned": [1]}
    assert await second.manifest("m", 2) == two.manifest
    assert await asyncio.to_thread(loaded, second, two) == list(two.shards)


async def test_two_servers_may_adopt_the_same_and_nothing_else(bucket: str) -> None:
    first, second = await opened(bucket, "a"), await opened(bucket, "b")
    same = make_version(1, adopted=True)
    for store in (first, second):
        await asyncio.to_thread(same.write, store)
    later = replace(same.record, commit_time_ns=99, push_id="other", idempotency_key="other")
    await asyncio.gather(
        first.commit(same.record, same.manifest), second.commit(later, same.manifest)
    )
    assert await versions(bucket) == [1]
    other = make_version(1, adopted=True, content_digest="0" * 32)
    based = replace(same.record, base_version=7, base_content_digest="0" * 32)
    for record in (other.record, based):
        with pytest.raises(WeightSyncError) as caught:
            await second.commit(record, other.manifest)
        assert caught.value.reason is Reason.VERSION_CONFLICT
    with pytest.raises(WeightSyncError) as caught:
        await second.commit(same.record, make_version(2).manifest)
    assert caught.value.reason is Reason.VERSION_CONFLICT


async def test_of_racing_commits_with_other_content_one_wins(bucket: str) -> None:
    stores = [await opened(bucket, f"server-{number}") for number in range(6)]
    made = [
        make_version(1, adopted=True, content_digest=f"{number:032x}", push_id=f"{number}")
        for number in range(6)
    ]
    for store, version in zip(stores, made, strict=True):
        await asyncio.to_thread(version.write, store)
    outcomes = await asyncio.gather(
        *(s.commit(v.record, v.manifest) for s, v in zip(stores, made, strict=True)),
        return_exceptions=True,
    )
    refused = [one for one in outcomes if isinstance(one, WeightSyncError)]
    assert [one.reason for one in refused] == [Reason.VERSION_CONFLICT] * 5
    (record,) = await open_store(bucket).open()
    # With the facts of its own commit.
    assert record == made[outcomes.index(None)].record


async def test_a_late_commit_of_an_older_epoch_never_counts(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await opened(bucket, "old"), await opened(bucket, "new")
    await old.write_epoch("m", 1)
    stale = make_version(5, epoch=1)
    await asyncio.to_thread(stale.write, old)
    create = ObjectClient.create

    async def late(client: ObjectClient, key: str, data: bytes) -> bytes:
        if key.startswith("m/versions/5/1"):
            # The old writer was frozen here, and its time has run out.
            await new.write_epoch("m", 2)
        return await create(client, key, data)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectClient, "create", late)
        with pytest.raises(WeightSyncError) as caught:
            await old.commit(stale.record, stale.manifest)
    assert caught.value.reason is Reason.EPOCH_STALE
    assert "m/versions/5/1.json" in await keys(bucket)
    assert await versions(bucket) == []
    with pytest.raises(WeightSyncError):
        await old.manifest("m", 5)
    # The number is free, for other content too.
    made = await committed(new, 5, epoch=2, content_digest="1" * 32)
    (record,) = await open_store(bucket).open()
    assert record == made.record


async def test_a_commit_before_the_floor_counts_though_its_epoch_is_over(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await opened(bucket, "old"), await opened(bucket, "new")
    await old.write_epoch("m", 1)
    made = make_version(5, epoch=1)
    await asyncio.to_thread(made.write, old)
    create = ObjectClient.create

    async def then_loses(client: ObjectClient, key: str, data: bytes) -> bytes:
        found = await create(client, key, data)
        if key.startswith("m/versions/5/1"):
            await new.write_epoch("m", 2)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ObjectClient, "create", then_loses)
        await old.commit(made.record, made.manifest)
    assert await versions(bucket) == [5]
    assert await new.committed_elsewhere("m") == [made.record]


async def test_whoever_finds_an_epoch_without_floor_makes_it(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await opened(bucket, "old")
    await old.write_epoch("m", 1)
    await committed(old, 4, epoch=1)
    create = ObjectClient.create

    async def dies(client: ObjectClient, key: str, data: bytes) -> bytes:
        if key.startswith("m/floors"):
            raise WeightSyncError(Reason.FAULT, "the writer died here")
        return await create(client, key, data)

    new = await opened(bucket, "new")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectClient, "create", dies)
        with pytest.raises(WeightSyncError, match="died"):
            await new.write_epoch("m", 2)
    assert "m/floors/2.json" not in await keys(bucket)
    assert await versions(bucket) == [4]
    assert "m/floors/2.json" in await keys(bucket)


async def test_an_epoch_goes_to_one_server(bucket: str) -> None:
    stores = [await opened(bucket, f"server-{number}") for number in range(4)]
    outcomes = await asyncio.gather(
        *(store.write_epoch("m", 1) for store in stores), return_exceptions=True
    )
    refused = [one for one in outcomes if isinstance(one, WeightSyncError)]
    assert [one.reason for one in refused] == [Reason.EPOCH_STALE] * 3
    assert [await store.collects("m") for store in stores] == [one is None for one in outcomes]


class _Death(BaseException):
    """The process ends here."""


class _Dying:
    """Ends the process before the Nth of the requests that change something, and at all after."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int) -> None:
        self.requests = 0
        for name in ("put", "try_create", "delete"):
            real = getattr(ObjectClient, name)

            async def step(*args: Any, real: Any = real) -> Any:
                self.requests += 1
                if self.requests >= nth:
                    raise _Death
                return await real(*args)

            patch.setattr(ObjectClient, name, step)


async def test_a_death_at_any_request_of_a_commit_leaves_a_whole_version_or_none(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for nth in range(1, 20):
        url = f"{bucket}/{nth}"
        store = await opened(url)
        await store.write_epoch("m", 1)
        made = make_version(1, epoch=1)
        await asyncio.to_thread(made.write, store)
        with monkeypatch.context() as patch, contextlib.suppress(_Death):
            dying = _Dying(patch, nth)
            await store.commit(made.record, made.manifest)
        after = await opened(url, "b")
        there = await versions(url) == [1]
        if there:
            assert await after.manifest("m", 1) == made.manifest
            assert await asyncio.to_thread(loaded, after, made) == list(made.shards)
        seen.append(there)
        # Whoever repeats it succeeds.
        again = await opened(url)
        await asyncio.to_thread(made.write, again)
        await again.commit(made.record, made.manifest)
        assert await versions(url) == [1]
        if dying.requests < nth:
            break
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (False, True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "every"), [(Fault.THROTTLE, 3), (Fault.LOSE_REPLY, 3), (Fault.STALL, 25)]
)
async def test_throttling_and_lost_answers_are_survived(
    bucket: str,
    s3: ObjectServer,
    reached: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    every: int,
) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "2s")
    with object_proxy(s3.port) as proxy:
        reached(s3, proxy.port)
        proxy.fault = lambda number, _method, _path: fault if number % every == 1 else Fault.NONE
        store = await opened(bucket)
        await store.write_epoch("m", 1)
        made = [await committed(store, number, epoch=1) for number in (1, 2)]
        big = os.urandom(40 << 20)
        await asyncio.to_thread(put_shard, store.shard_path("m", 3, 0), big)
        view = bytearray(len(big))
        place = store.shard_path("m", 3, 0) or ""
        await asyncio.to_thread(download, place, memoryview(view), lambda: None)
        assert view == big
        await store.delete("m", 1)
        assert await open_store(bucket).open() == [made[1].record]
        assert proxy.met[fault] > 4


async def test_a_store_that_ignores_conditions_is_refused(
    bucket: str, s3: ObjectServer, reached: Callable[..., None]
) -> None:
    with object_proxy(s3.port) as proxy:
        reached(s3, proxy.port)
        proxy.fault = lambda _number, _method, _path: Fault.IGNORE_CONDITION
        with pytest.raises(WeightSyncError) as caught:
            await open_store(bucket).open()
    assert caught.value.reason is Reason.NOT_SUPPORTED
    assert "If-None-Match" in caught.value.message
    assert not await keys(bucket, "probe")


async def test_s3rver_is_refused_because_it_overwrites(
    overwriting: ObjectServer, reached: Callable[..., None], tmp_path: Path
) -> None:
    reached(overwriting)
    url = f"{overwriting.url}/{tmp_path.name}"
    with pytest.raises(WeightSyncError) as caught:
        await open_store(url).open()
    assert caught.value.reason is Reason.NOT_SUPPORTED
    assert f"the store at {url} wrote over an object although" in caught.value.message
    # That is what it does, and all that is wrong with it.
    client = ObjectClient(url)
    assert await client.try_create("key", b"first")
    assert await client.try_create("key", b"second")
    assert await client.get("key") == b"second"
    # What it was asked with has been taken away.
    assert not await keys(url, "_probe")


async def test_a_store_that_is_away_is_named(
    bucket: str, s3: ObjectServer, reached: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=1)}
    monkeypatch.setattr(object_client, "_RETRIES", retries)
    reached(s3, 9)
    with pytest.raises(WeightSyncError) as caught:
        await open_store(bucket).open()
    assert caught.value.reason is Reason.FAULT
    assert "no valid answer from the object store" in caught.value.message


async def test_what_is_no_store_of_ours_is_refused(bucket: str, s3: ObjectServer) -> None:
    client = ObjectClient(bucket)
    await client.put("something", b"else")
    with pytest.raises(WeightSyncError, match="not empty"):
        await open_store(bucket).open()
    await client.delete(["something"])
    await client.put("weightsync-store.json", b"{}")
    with pytest.raises(WeightSyncError, match="newer release"):
        await open_store(bucket).open()


async def test_a_half_sent_shard_is_seen_by_nobody(bucket: str, s3: ObjectServer) -> None:
    store = await opened(bucket)
    data = os.urandom(70 << 20)
    left = [8]

    def look() -> None:
        left[0] -= 1
        if not left[0]:
            raise _Death

    with pytest.raises(_Death):
        await asyncio.to_thread(upload, memoryview(data), store.shard_path("m", 1, 0) or "", look)
    assert await keys(bucket) == set()
    await asyncio.to_thread(put_shard, store.shard_path("m", 1, 0), data)
    shards = {key for key in await keys(bucket) if "/shards/" in key}
    assert len(shards) == 1
    # Large ones are sent in parts.
    address = f"http://127.0.0.1:{s3.port}/{bucket.partition('://')[2]}/{shards.pop()}"
    reply = await asyncio.to_thread(httpx.head, address)
    assert "-" in reply.headers["etag"]


async def test_a_shard_that_is_missing_or_cut_makes_its_version_lost(bucket: str) -> None:
    store = await opened(bucket)
    for number in (1, 2, 3):
        await committed(store, number)
    client = ObjectClient(bucket)
    gone, cut = (store.shard_path("m", number, 0) or "" for number in (1, 2))
    await client.delete([gone.removeprefix(f"{bucket}/")])
    await client.put(cut.removeprefix(f"{bucket}/"), b"short")
    again = open_store(bucket)
    assert [record.version for record in await again.open()] == [3]
    assert [sentence.partition(" ")[0] for sentence in again.lost] == ["m/v1", "m/v2"]
    await client.put("m/versions/3/1.json", b"{}")
    assert await versions(bucket) == []


async def test_equal_shards_are_kept_once_and_stay_while_a_version_needs_them(bucket: str) -> None:
    store = await opened(bucket)
    one = await committed(store, 1)
    two = make_version(2)
    two = replace(two, manifest=one.manifest, shards=one.shards)
    record = replace(one.record, version=2)
    await asyncio.to_thread(replace(two, record=record).write, store)
    await store.commit(record, one.manifest)
    shards = {key for key in await keys(bucket) if "/shards/" in key}
    assert len(shards) == 2
    await store.delete("m", 1)
    assert {key for key in await keys(bucket) if "/shards/" in key} == shards
    assert await versions(bucket) == [2]
    await store.delete("m", 2)
    left = {key for key in await keys(bucket) if "clocks" not in key}
    assert left == {"m/epochs/1.json", "m/floors/1.json"}


async def test_shards_of_a_committed_version_are_never_written(bucket: str) -> None:
    store = await opened(bucket)
    made = await committed(store, 1)
    await asyncio.to_thread(made.write, store)
    with pytest.raises(WeightSyncError) as caught:
        await asyncio.to_thread(put_shard, store.shard_path("m", 1, 0), b"other bytes")
    assert caught.value.reason is Reason.VERSION_CONFLICT
    assert await asyncio.to_thread(loaded, store, made) == list(made.shards)


async def test_an_incomplete_version_is_not_committed(bucket: str) -> None:
    store = await opened(bucket)
    made = make_version(1)
    with pytest.raises(WeightSyncError) as caught:
        await store.commit(made.record, made.manifest)
    assert caught.value.reason is Reason.PUSH_INCOMPLETE
    await asyncio.to_thread(put_shard, store.shard_path("m", 1, 0), made.shards[0])
    await asyncio.to_thread(put_shard, store.shard_path("m", 1, 1), made.shards[1] + b"x")
    with pytest.raises(WeightSyncError) as caught:
        await store.commit(made.record, made.manifest)
    assert "shard 1 has" in caught.value.message
    assert await versions(bucket) == []


async def test_each_server_finds_its_own_open_pushes(bucket: str) -> None:
    first, second = await opened(bucket, "a"), await opened(bucket, "b")
    record = PushRecord("id", "m", 7, 0, "00")
    await first.record_push(record)
    made = make_version(7)
    entry, data = made.manifest.layout.shards[0], made.shards[0]
    header = shard_transfer.shard_name(memoryview(data)[8 : entry.data_start], lambda: None).digest
    place = first.shard_path("m", 7, 0) or ""
    await asyncio.to_thread(upload, memoryview(data), place, lambda: None, entry, header)
    again = await opened(bucket, "a")
    (push,) = await again.open_pushes("m")
    assert push.record == replace(record, server="a")
    (shard,) = push.shards
    assert (shard.index, shard.entry, shard.is_whole) == (0, entry, True)
    assert shard.tensors == made.manifest.layout.by_shard[0]
    assert await second.open_pushes("m") == []
    await again.discard("m", 7)
    assert await again.open_pushes("m") == []
    await committed(second, 7, adopted=True)
    with pytest.raises(WeightSyncError) as caught:
        await again.record_push(record)
    assert caught.value.reason is Reason.VERSION_CONFLICT


async def test_what_no_version_needs_is_removed_when_it_is_old_enough(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(bucket)
    await store.write_epoch("m", 1)
    made = await committed(store, 1, epoch=1)
    await store.record_push(PushRecord("id", "m", 2, 1, "00"))
    coming = make_version(2, epoch=1)
    await asyncio.to_thread(coming.write, store)
    await asyncio.to_thread(put_shard, store.shard_path("m", 3, 0), b"left behind")
    await store.discard("m", 3)
    # Of a commit that never came to its record.
    facts = "m/facts/3/1-0.json"
    await ObjectClient(bucket).put(facts, b"{}")
    before = await keys(bucket)
    # Young: it may belong to a push whose receipt is on its way.
    await opened(bucket)
    assert await keys(bucket) - {"m/clocks/a.json"} == before - {"m/clocks/a.json"}
    monkeypatch.setattr(object_catalog, "UNCOMMITTED_FOR", timedelta(0))
    await opened(bucket, "b")
    assert await keys(bucket) - {"m/clocks/b.json"} == before | {"m/clocks/a.json"}
    with monkeypatch.context() as patch:
        patch.setattr(object_catalog, "_abandoned", lambda _found, _now: set())
        await opened(bucket)
    gone = before - await keys(bucket)
    assert len(gone) == 2
    gone.remove(facts)
    assert gone.pop().endswith("-11")
    await store.commit(coming.record, coming.manifest)
    assert await versions(bucket) == [1, 2]
    assert await asyncio.to_thread(loaded, store, made) == list(made.shards)


async def test_only_the_server_that_has_the_epoch_deletes(bucket: str) -> None:
    first, second = await opened(bucket, "a"), await opened(bucket, "b")
    await first.write_epoch("m", 1)
    await committed(first, 1, epoch=1)
    assert [await store.collects("m") for store in (first, second)] == [True, False]
    with pytest.raises(WeightSyncError) as caught:
        await second.delete("m", 1)
    assert caught.value.reason is Reason.EPOCH_STALE
    assert await versions(bucket) == [1]
    await second.write_epoch("m", 2)
    await second.delete("m", 1)
    assert await versions(bucket) == []


@pytest.mark.parametrize("epoch", [0, 1])
async def test_of_several_servers_one_commits_folds_and_deletes(bucket: str, epoch: int) -> None:
    first, second = await opened(bucket, "a"), await opened(bucket, "b")
    if epoch:
        await first.write_epoch("m", epoch)
    assert [await store.collects("m") for store in (first, second)] == [bool(epoch), False]
    one = await committed(first, 1, epoch=epoch)
    assert [await store.collects("m") for store in (first, second)] == [True, False]
    two = make_version(2, epoch=epoch)
    await asyncio.to_thread(two.write, second)
    attempts: list[Callable[[], Any]] = [
        lambda: second.record_push(PushRecord("id", "m", 2, epoch, "00")),
        lambda: second.commit(two.record, two.manifest),
        lambda: second.fold(one.record, one.manifest),
        lambda: second.delete("m", 1),
    ]
    for attempt in attempts:
        with pytest.raises(WeightSyncError, match="acquire an epoch here") as caught:
            await attempt()
        assert caught.value.reason is Reason.EPOCH_STALE
    assert await versions(bucket) == [1]
    # The one that has it is the same after a restart.
    await committed(await opened(bucket, "a"), 2, epoch=epoch)
    await second.write_epoch("m", epoch + 1)
    await committed(second, 3, epoch=epoch + 1)
    assert [await store.collects("m") for store in (first, second)] == [False, True]


async def test_nobody_collects_under_an_epoch_whose_object_is_gone(bucket: str) -> None:
    first, second = await opened(bucket, "a"), await opened(bucket, "b")
    await first.write_epoch("m", 1)
    await second.write_epoch("m", 2)
    await ObjectClient(bucket).delete(["m/epochs/2.json"])
    assert [await store.collects("m") for store in (first, second)] == [False, False]
    with pytest.raises(WeightSyncError) as caught:
        await committed(await opened(bucket, "b"), 1, epoch=2)
    assert caught.value.reason is Reason.DATA_CORRUPT


async def test_what_a_damaged_record_may_need_is_not_removed(bucket: str) -> None:
    store = await opened(bucket)
    await committed(store, 1)
    await committed(store, 2)
    shards = {key for key in await keys(bucket) if "/shards/" in key}
    await ObjectClient(bucket).put("m/versions/2/1.json", b"{}")
    await store.delete("m", 1)
    assert await versions(bucket) == []
    assert {key for key in await keys(bucket) if "/shards/" in key} == shards


async def test_a_version_can_be_read_when_its_deletion_failed(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(bucket)
    made = await committed(store, 1)

    delete = ObjectClient.delete

    async def fails(client: ObjectClient, keys: Any) -> None:
        if any("/versions/" in key for key in keys):
            raise WeightSyncError(Reason.FAULT, "the objects stay; try again")
        await delete(client, keys)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectClient, "delete", fails)
        with pytest.raises(WeightSyncError, match="objects stay"):
            await store.delete("m", 1)
    assert await asyncio.to_thread(loaded, store, made) == list(made.shards)


async def test_an_epoch_without_its_floor_does_not_double_a_version(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server adopts while the last commit of the epoch before comes, both of one number."""
    elsewhere = await opened(f"{bucket}-elsewhere", "a")
    await committed(elsewhere, 1, epoch=1, content_digest="1" * 32)
    theirs = await ObjectClient(elsewhere.url).get("m/versions/1/1.json")
    store, client = await opened(bucket, "b"), ObjectClient(bucket)
    mine = make_version(1, adopted=True)
    await asyncio.to_thread(mine.write, store)
    await client.create("m/epochs/2.json", encode_document({"server": "a"}))
    floor = ObjectFence.floor

    async def overtaken(fence: ObjectFence) -> Floor:
        await client.create("m/versions/1/1.json", theirs or b"")
        return await floor(fence)

    monkeypatch.setattr(ObjectFence, "floor", overtaken)
    with pytest.raises(WeightSyncError) as caught:
        await store.commit(mine.record, mine.manifest)
    assert caught.value.reason is Reason.VERSION_CONFLICT
    assert {key for key in await keys(bucket) if "/versions/" in key} == {"m/versions/1/1.json"}


async def test_a_store_that_another_server_made_meanwhile_is_used(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_empty = ObjectClient.is_empty

    async def late(client: ObjectClient) -> bool:
        await client.create(MARKER, encode_document({"format": 1}))
        await client.put("m/marks.json", encode_document({}))
        return await is_empty(client)

    monkeypatch.setattr(ObjectClient, "is_empty", late)
    assert await open_store(bucket).open() == []


async def test_the_probe_of_a_start_is_no_model(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []
    create = ObjectClient.try_create

    async def noted(client: ObjectClient, key: str, data: bytes) -> bool:
        created.append(key)
        return await create(client, key, data)

    monkeypatch.setattr(ObjectClient, "try_create", noted)
    await opened(bucket)
    folders = {key.partition("/")[0] for key in created if "/" in key}
    assert folders
    assert not any(map(MODEL_NAME.fullmatch, folders))


def test_what_is_a_receipt_does_not_depend_on_the_prefix() -> None:
    for root in ("s3://b", "s3://pushes", "s3://b/pushes", "s3://b/shards", "s3://b/pushes/shards"):
        for model in ("m", "pushes", "shards"):
            assert not is_receipt(f"{root}/{model}/shards/{'0' * 32}-7")
            assert is_receipt(f"{root}/{model}/pushes/a/7/delta-0")


async def test_what_was_lost_is_named_once(bucket: str) -> None:
    store = await opened(bucket)
    await committed(store, 1)
    await ObjectClient(bucket).put("m/versions/1/1.json", b"{}")
    again = await opened(bucket)
    for _ in range(2):
        assert await again.committed_elsewhere("m") == []
        assert len(again.lost) == 1


async def test_no_password_of_an_address_is_shown(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_client, "_RETRIES", {"max_retries": 0})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:1")
    object_client.connect.cache_clear()
    with pytest.raises(WeightSyncError) as caught:
        await open_store(bucket).open()
    assert "secret" not in caught.value.message


async def test_an_old_shard_is_put_again(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened(bucket)
    put: list[str] = []
    real = shard_transfer._put

    def counted(bucket: Any, key: str, *rest: Any) -> None:
        put.append(key)
        real(bucket, key, *rest)

    monkeypatch.setattr(shard_transfer, "_put", counted)
    for expected in (1, 1):
        await asyncio.to_thread(put_shard, store.shard_path("m", 1, 0), b"the same bytes")
        assert len(put) == expected
    monkeypatch.setattr(shard_transfer, "REUSED_FOR", timedelta(0))
    await asyncio.to_thread(put_shard, store.shard_path("m", 1, 0), b"the same bytes")
    assert len(put) == 2


async def test_a_shard_that_was_sent_too_long_ago_is_not_committed(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(bucket)
    made = make_version(1)
    await asyncio.to_thread(made.write, store)
    monkeypatch.setattr(model_objects, "UNCOMMITTED_FOR", timedelta(0))
    monkeypatch.setattr(model_objects, "_MARGIN", timedelta(hours=1))
    with pytest.raises(WeightSyncError, match="too long ago"):
        await store.commit(made.record, made.manifest)


async def committed_delta(store: Store, version: int, base: int) -> Version:
    """Commit a version as the change of another one; their bytes do not matter to a store."""
    facts: dict[str, Any] = {
        "base_version": base,
        "base_content_digest": make_version(base).record.content_digest,
        "delta_bytes": 7,
    }
    made, delta = make_version(version, **facts), make_version(version + 100, shards=1)
    place = store.shard_path("m", version, 0, delta=True)
    await asyncio.to_thread(put_shard, place, delta.shards[0])
    await store.commit(made.record, made.manifest, delta.manifest)
    return made


async def test_a_delta_is_there_for_another_server(bucket: str) -> None:
    store = await opened(bucket)
    await committed(store, 1)
    second = await committed_delta(store, 2, 1)
    other = open_store(bucket, "b")
    assert (await other.open())[1] == second.record
    assert await other.manifest("m", 2) == second.manifest
    delta = make_version(102, shards=1)
    assert await other.delta("m", 2) == delta.manifest
    view = bytearray(len(delta.shards[0]))
    place = other.shard_path("m", 2, 0, delta=True) or ""
    await asyncio.to_thread(download, place, memoryview(view), lambda: None)
    assert view == delta.shards[0]
    with pytest.raises(WeightSyncError):
        await other.delta("m", 1)
    with pytest.raises(WeightSyncError) as caught:
        await store.delete("m", 1)
    assert caught.value.reason is Reason.VERSION_IN_USE
    assert await versions(bucket) == [1, 2]
    await ObjectClient(bucket).delete(["m/versions/1/1.json"])
    again = open_store(bucket)
    assert await again.open() == []
    assert [sentence.partition(" ")[0] for sentence in again.lost] == ["m/v2"]


async def test_a_death_at_any_request_of_a_fold_leaves_one_whole_form(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = []
    for nth in range(1, 20):
        url = f"{bucket}/{nth}"
        store = await opened(url)
        await committed(store, 1)
        second = await committed_delta(store, 2, 1)
        await asyncio.to_thread(second.write, store)
        whole = replace(second.record, base_version=0, base_content_digest="", delta_bytes=0)
        with monkeypatch.context() as patch, contextlib.suppress(_Death):
            dying = _Dying(patch, nth)
            await store.fold(whole, second.manifest)
        after = open_store(url, "b")
        records = await after.open()
        assert [record.version for record in records] == [1, 2]
        delta = bool(records[1].base_version)
        if not delta:
            assert records[1] == whole
            assert await asyncio.to_thread(loaded, after, second) == list(second.shards)
        assert await after.manifest("m", 2) == second.manifest
        forms.append(delta)
        if dying.requests < nth:
            break
    assert forms == sorted(forms, reverse=True)
    assert (forms[0], forms[-1]) == (True, False)
    assert not {key for key in await keys(url) if "pushes" in key}


async def test_what_a_fold_left_is_forgotten(bucket: str) -> None:
    store = await opened(bucket)
    await committed(store, 1)
    second = await committed_delta(store, 2, 1)
    await asyncio.to_thread(second.write, store)
    await store.tidy("m", 2)
    assert not {key for key in await keys(bucket) if "pushes" in key}
    with pytest.raises(WeightSyncError) as caught:
        await store.fold(second.record, second.manifest)
    assert caught.value.reason is Reason.PUSH_INCOMPLETE


def test_a_request_is_tried_again_until_its_time_is_over() -> None:
    # As short as pauses can be drawn, they do not use up the tries before.
    retries = object_client._RETRIES
    assert retries["max_retries"] * retries["backoff"]["init_backoff"] > retries["retry_timeout"]
    assert retries["retry_timeout"] == timedelta(seconds=30)


#: Times of `_RETRIES` are as many times shorter here, so its pauses are as many as they are.
_SCALE = 6
_AWAY = pytest.mark.parametrize("away", ["throttles", "refuses"])


@pytest.fixture
def outage(
    away: str, s3: ObjectServer, reached: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Have this test reach a store that is away, in a part of the time; return what ends it."""
    real = object_client._RETRIES
    backoff = {
        name: value / _SCALE if isinstance(value, timedelta) else value
        for name, value in real["backoff"].items()
    }
    retries = real | {"retry_timeout": real["retry_timeout"] / _SCALE, "backoff": backoff}
    monkeypatch.setattr(object_client, "_RETRIES", retries)
    if away == "throttles":
        with object_proxy(s3.port) as proxy:
            proxy.fault = lambda _number, _method, _path: Fault.THROTTLE
            reached(s3, proxy.port)
            yield lambda: setattr(proxy, "fault", lambda _number, _method, _path: Fault.NONE)
        return
    link = FaultProxy(f"127.0.0.1:{s3.port}")
    link.faults.refuse = True
    reached(s3, int(link.address.rpartition(":")[2]))
    yield lambda: setattr(link.faults, "refuse", False)
    link.close()


async def _asked(bucket: str, data: bytes) -> Sequence[Any]:
    """Do one of each to a store at once; return what each returned or raised."""
    client, path = ObjectClient(bucket), open_store(bucket).shard_path("m", 1, 0)
    return await asyncio.gather(
        client.put("b", data),
        client.get("a"),
        client.list_under("under"),
        client.create("c", data),
        asyncio.to_thread(put_shard, path, data),
        return_exceptions=True,
    )


@_AWAY
async def test_a_store_that_is_back_within_the_time_of_a_request_has_failed_nothing(
    bucket: str, outage: Callable[[], None]
) -> None:
    client, data = ObjectClient(bucket), os.urandom(100_000)
    asking = asyncio.create_task(_asked(bucket, data))
    ended, _ = await asyncio.wait({asking}, timeout=2)
    assert not ended, asking.result()
    outage()
    assert list(await asking) == [None, None, {}, data, None]
    assert [await client.get(key) for key in ("b", "c")] == [data, data]
    assert len(await keys(bucket)) == 2


@_AWAY
async def test_a_store_that_stays_away_is_named_when_the_time_of_a_request_is_over(
    bucket: str, outage: Callable[[], None]
) -> None:
    client, data, begun = ObjectClient(bucket), os.urandom(100_000), time.monotonic()
    asking = asyncio.create_task(_asked(bucket, data))
    for error in await asking:
        assert isinstance(error, WeightSyncError), error
        assert error.reason is Reason.FAULT
        assert "no valid answer from the object store" in error.message
        assert "check its address, the network and the credentials" in error.message
    # The documented 30 s, scaled: no request was given up earlier.
    assert time.monotonic() - begun >= 30 / _SCALE
    outage()
    await client.put("b", data)
    assert await client.get("b") == data
