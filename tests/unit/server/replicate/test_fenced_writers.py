"""What a fenced writer leaves in a bucket is never followed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.versions import make_version
from tests.unit.server.deltas.pushing import until
from tests.unit.server.replicate.conftest import following
from tests.unit.server.world import real_fetchers
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store import open_reader, open_store
from weightsync_server.store.objects.object_client import ObjectClient
from weightsync_server.store.store_records import encode_document

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_version_above_the_floor_is_not_followed_and_its_number_is_free(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = open_store(bucket, "old"), open_store(bucket, "new")
    await old.open()
    await new.open()
    await old.write_epoch("m", 1)
    good, late = make_version(4, epoch=1), make_version(5, epoch=1)
    await asyncio.to_thread(good.write, old)
    await old.commit(good.record, good.manifest)
    create = ObjectClient.create

    async def frozen(client: ObjectClient, key: str, data: bytes) -> bytes:
        if key.startswith("m/versions/5/1"):
            # The writer stood still here, and another one took over.
            await new.write_epoch("m", 2)
        return await create(client, key, data)

    await asyncio.to_thread(late.write, old)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectClient, "create", frozen)
        with pytest.raises(WeightSyncError) as caught:
            await old.commit(late.record, late.manifest)
    assert caught.value.reason is Reason.EPOCH_STALE
    async with (
        real_fetchers() as fetchers,
        following(tmp_path / "b", bucket, fetchers=fetchers) as there,
    ):
        await until(lambda: there.has(4, good.record.content_digest))
        assert not there.has(5)
        assert await there.follower.find(late.record.content_digest) is None
        # The new writer gives the number to its own content.
        other = make_version(5, shards=3, epoch=2)
        assert other.record.content_digest != late.record.content_digest
        await asyncio.to_thread(other.write, new)
        await new.commit(other.record, other.manifest)
        await until(lambda: there.has(5, other.record.content_digest))
        assert there.here.model.table.get(5).epoch == 2


async def test_a_floor_that_is_missing_is_waited_for_and_not_made(bucket: str) -> None:
    origin, client = open_store(bucket, "old"), ObjectClient(bucket)
    await origin.open()
    await origin.write_epoch("m", 1)
    for number in (4, 5):
        made = make_version(number, epoch=1)
        await asyncio.to_thread(made.write, origin)
        if number == 5:
            before = open_reader(bucket)
            assert [one.version for one in await before.committed("m")] == [4]
        await origin.commit(made.record, made.manifest)
    # A writer that died as soon as it had created its epoch.
    await client.create("m/epochs/2.json", encode_document({"server": "dead"}))
    keys = await client.list_under("m")
    after = open_reader(bucket)
    # What counted once counts for ever; whether version 5 does is for the floor to say.
    assert [one.version for one in await before.committed("m")] == [4]
    assert await after.committed("m") == []
    stamps = await after.stamps("m")
    assert stamps == await after.stamps("m")
    assert await client.list_under("m") == keys
    await open_store(bucket, "new").open()
    assert "m/floors/2.json" in await client.list_under("m")
    assert await after.stamps("m") != stamps
    for reader in (before, after):
        assert [one.version for one in await reader.committed("m")] == [4, 5]


async def test_records_are_read_once(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, reader = open_store(bucket, "origin"), open_reader(bucket)
    await origin.open()
    asked: list[str] = []
    get = ObjectClient.get

    async def counted(client: ObjectClient, key: str) -> bytes | None:
        asked.append(key)
        return await get(client, key)

    for number in range(1, 4):
        made = make_version(number)
        await asyncio.to_thread(made.write, origin)
        await origin.commit(made.record, made.manifest)
        with monkeypatch.context() as patch:
            patch.setattr(ObjectClient, "get", counted)
            assert len(await reader.committed("m")) == number
    records = [key for key in asked if key.startswith("m/versions/")]
    assert records == [f"m/versions/{number}/1.json" for number in range(1, 4)]
    await origin.delete("m", 1)
    assert [one.version for one in await reader.committed("m")] == [2, 3]
