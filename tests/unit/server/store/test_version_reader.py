"""A store as somebody reads it who does not own it: nothing is opened, nothing is changed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import ForgetfulDisk
from tests.support.versions import make_version
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops import durable_files
from weightsync_server.store import open_reader, open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.object_servers import ObjectServer
    from weightsync_server.store.protocol import Store


def files_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


@pytest.fixture(params=["local", "s3", "az"])
async def lasting(
    request: pytest.FixtureRequest, root: Path, reached: Callable[..., None]
) -> Store:
    """Return an opened store of each kind that another server can read."""
    url = str(root)
    if request.param != "local":
        server: ObjectServer = request.getfixturevalue(request.param)
        reached(server)
        url = f"{server.url}/{root.parent.name}"
    opened = open_store(url, "owner")
    await opened.open()
    return opened


async def test_a_reader_sees_what_is_committed_and_when_that_changes(lasting: Store) -> None:
    reader = open_reader(lasting.url)
    assert await reader.committed("m") == []
    before = await reader.stamps("m")
    one = make_version(3)
    await asyncio.to_thread(one.write, lasting)
    assert await reader.stamps("m") == before
    await lasting.commit(one.record, one.manifest)
    assert await reader.stamps("m") != before
    (found,) = await reader.committed("m")
    assert found == one.record
    assert (await reader.manifest("m", 3)).content_digest == one.record.content_digest
    there = await reader.stamps("m")
    assert there == await reader.stamps("m")
    await lasting.delete("m", 3)
    assert await reader.stamps("m") != there
    assert await reader.committed("m") == []


async def test_of_a_version_that_is_gone_nothing_is_read_and_that_is_said(lasting: Store) -> None:
    one, reader = make_version(3), open_reader(lasting.url)
    await asyncio.to_thread(one.write, lasting)
    await lasting.commit(one.record, one.manifest)
    assert await reader.committed("m") == [one.record]
    assert reader.shard_path("m", 3, 0)
    await lasting.delete("m", 3)
    await reader.committed("m")
    with pytest.raises(WeightSyncError) as caught:
        await reader.manifest("m", 3)
    assert caught.value.reason is Reason.VERSION_UNKNOWN
    if not lasting.local:
        with pytest.raises(WeightSyncError, match="the server looks for it again") as caught:
            reader.shard_path("m", 3, 0)
        assert caught.value.reason is Reason.VERSION_UNKNOWN


async def test_another_model_is_no_change(lasting: Store) -> None:
    reader = open_reader(lasting.url)
    before = await reader.stamps("m")
    other = make_version(1, model="other")
    await asyncio.to_thread(other.write, lasting)
    await lasting.commit(other.record, other.manifest)
    assert await reader.stamps("m") == before
    assert await reader.committed("m") == []


async def test_a_reader_leaves_open_pushes_and_damage_alone(store: Store, root: Path) -> None:
    good, other = make_version(1), make_version(2)
    for made in (good, other):
        made.write(store)
        await store.commit(made.record, made.manifest)
    make_version(3).write(store)
    record = root / "m" / "v2" / "commit.json"
    await asyncio.to_thread(record.write_bytes, b"{}")
    files = await asyncio.to_thread(files_of, root)
    reader = open_reader(str(root))
    assert await reader.committed("m") == [good.record]
    await reader.stamps("m")
    assert await asyncio.to_thread(files_of, root) == files


async def test_a_folder_that_is_no_store_is_told(root: Path) -> None:
    reader = open_reader(str(root))
    for ask in (reader.committed, reader.stamps):
        with pytest.raises(WeightSyncError, match="is not a store of versions") as caught:
            await ask("m")
        assert caught.value.reason is Reason.FAULT
    assert not await asyncio.to_thread(root.exists)


def test_what_nobody_else_can_read_cannot_be_followed() -> None:
    with pytest.raises(WeightSyncError) as caught:
        open_reader("memory://")
    assert caught.value.reason is Reason.NOT_SUPPORTED


async def test_what_a_reader_shows_is_not_taken_back_by_a_crash_of_the_owner(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ForgetfulDisk(root)
    disk.install(monkeypatch)
    one = make_version(1)
    await asyncio.to_thread(one.write, store)
    flush, directory = durable_files.flush_directory, root / "m" / "v1"
    stood, goes_on = threading.Event(), threading.Event()

    def stand(path: Path) -> None:
        if path == directory and (directory / "commit.json").exists() and not stood.is_set():
            stood.set()
            goes_on.wait(30)
        flush(path)

    monkeypatch.setattr(durable_files, "flush_directory", stand)
    committing = asyncio.create_task(store.commit(one.record, one.manifest))
    try:
        await asyncio.to_thread(stood.wait, 30)
        assert await open_reader(str(root)).committed("m") == [one.record]
        # The owner has not flushed the name of its record yet.
        await asyncio.to_thread(disk.lose_power)
        assert await open_reader(str(root)).committed("m") == [one.record]
    finally:
        goes_on.set()
        with contextlib.suppress(WeightSyncError):
            await committing
        disk.close()
