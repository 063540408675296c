"""What every store does: a folder, memory, and buckets that speak two protocols."""

from __future__ import annotations

import errno
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.versions import make_version
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops import durable_files
from weightsync_server.store import open_store
from weightsync_server.store.local.local_store import LocalStore
from weightsync_server.store.memory_store import MemoryStore
from weightsync_server.store.objects.object_keys import is_location

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weightsync_server.store.protocol import Store

_OBJECTS = "weightsync_server.store.objects"


def test_a_url_names_a_store(tmp_path: Path) -> None:
    assert isinstance(open_store("memory://"), MemoryStore)
    assert not open_store("memory://").durable
    local = open_store(f"file://{tmp_path}/with%20space")
    assert isinstance(local, LocalStore)
    assert local.durable
    assert open_store(local.url).url == local.url
    assert local.shard_path("m", 3, 0) == f"{tmp_path}/with space/m/v3/0.safetensors"
    for folder in ("some/where", "s3", "memory"):
        assert open_store(folder).url == (Path.cwd() / folder).as_uri()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3:///x",
        "s3://user@bucket/x",
        "s3://bucket/../x",
        "gs://b/x?y",
        "file://host/x",
        "file://x",
        "memory://x",
        "http://a/b",
        "file:///a?b",
    ],
)
def test_other_urls_are_refused_with_what_is_supported(url: str) -> None:
    with pytest.raises(WeightSyncError) as caught:
        open_store(url)
    assert caught.value.reason == Reason.NOT_SUPPORTED
    assert "s3://" in caught.value.message


@pytest.mark.parametrize(
    "model", ["", ".", "..", "../x", "a/b", "/etc", "a\0b", ".hidden", "-x", "a\n", "ä", "a" * 129]
)
async def test_no_path_comes_from_a_name_that_does_not_match(model: str, any_store: Store) -> None:
    version = make_version(model=model)
    acts: list[Callable[[], Awaitable[object]]] = [
        lambda: any_store.commit(version.record, version.manifest),
        lambda: any_store.discard(model, 1),
        lambda: any_store.manifest(model, 1),
        lambda: any_store.delete(model, 1),
        lambda: any_store.read_epoch(model),
        lambda: any_store.write_epoch(model, 1),
        lambda: any_store.read_marks(model),
        lambda: any_store.write_marks(model, {}),
    ]
    for act in acts:
        with pytest.raises(WeightSyncError) as caught:
            await act()
        assert caught.value.reason == Reason.REQUEST_INVALID
    with pytest.raises(WeightSyncError):
        any_store.shard_path(model, 1, 0)


@pytest.mark.parametrize(("version", "shard"), [(0, 0), (-1, 0), (1 << 53, 0), (True, 0), (1, -1)])
async def test_no_path_comes_from_an_impossible_number(
    version: int, shard: int, any_store: Store
) -> None:
    with pytest.raises(WeightSyncError) as caught:
        any_store.shard_path("m", version, shard)
    assert caught.value.reason == Reason.REQUEST_INVALID


async def test_a_committed_version_is_there(any_store: Store) -> None:
    versions = [make_version(number) for number in (10, 9, 2)]
    versions.append(make_version(2, model="a-model"))
    for version in versions:
        version.write(any_store)
        await any_store.commit(version.record, version.manifest)
    found = await any_store.open()
    assert [(record.model, record.version) for record in found] == [
        ("a-model", 2), ("m", 2), ("m", 9), ("m", 10),
    ]  # fmt: skip
    assert found[-1] == versions[0].record
    assert await any_store.manifest("m", 10) == versions[0].manifest


async def test_committing_again_changes_nothing(any_store: Store) -> None:
    version = make_version()
    version.write(any_store)
    await any_store.commit(version.record, version.manifest)
    again = replace(version.record, commit_time_ns=99, epoch=2)
    await any_store.commit(again, version.manifest)
    assert await any_store.open() == [version.record]
    other = make_version(content_digest="0" * 32, epoch=2)
    with pytest.raises(WeightSyncError) as caught:
        await any_store.commit(other.record, other.manifest)
    assert caught.value.reason == Reason.VERSION_CONFLICT
    await any_store.discard("m", 1)
    assert await any_store.manifest("m", 1) == version.manifest


async def test_a_version_does_not_exist_before_the_names_of_its_shards_last(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = any_store.shard_path("m", 1, 0)
    if place is None or is_location(place):
        pytest.skip("its shards are no files")
    version = make_version()
    version.write(any_store)

    def fail(folder: Path | str) -> None:
        raise OSError(errno.EIO, "not flushed", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(durable_files, "flush_directory", fail)
        with pytest.raises(WeightSyncError):
            await any_store.commit(version.record, version.manifest)
    assert await any_store.open() == []


async def test_a_deleted_version_is_gone(any_store: Store) -> None:
    version = make_version()
    version.write(any_store)
    await any_store.commit(version.record, version.manifest)
    for _ in range(2):
        await any_store.delete("m", 1)
    assert await any_store.open() == []
    with pytest.raises(WeightSyncError) as caught:
        await any_store.manifest("m", 1)
    assert caught.value.reason == Reason.VERSION_UNKNOWN


async def test_only_the_newest_epoch_commits(any_store: Store) -> None:
    assert await any_store.read_epoch("m") == 0
    await any_store.write_epoch("m", 7)
    await any_store.write_epoch("m", 7)
    assert await any_store.read_epoch("m") == 7
    assert await any_store.read_epoch("other") == 0
    stale, adopted, good = (
        make_version(1, epoch=6), make_version(1, epoch=0, adopted=True), make_version(2, epoch=7),
    )  # fmt: skip
    stale.write(any_store)
    for act in (
        any_store.write_epoch("m", 6),
        any_store.commit(stale.record, stale.manifest),
    ):
        with pytest.raises(WeightSyncError) as caught:
            await act
        assert caught.value.reason == Reason.EPOCH_STALE
        assert caught.value.metadata == {"epoch": "7"}
    assert await any_store.open() == []
    for version in (adopted, good):
        version.write(any_store)
    await any_store.commit(adopted.record, adopted.manifest)
    await any_store.commit(good.record, good.manifest)


async def test_marks_are_replaced_whole(any_store: Store) -> None:
    assert await any_store.read_marks("m") == {}
    marks = {"pinned": [3, 4], "rejected": {"5": 'loss "NaN" \u202e'}}
    await any_store.write_marks("m", marks)
    assert await any_store.read_marks("m") == marks
    await any_store.write_marks("m", {})
    assert await any_store.read_marks("m") == {}


async def test_the_memory_store_keeps_no_shard() -> None:
    store = MemoryStore()
    assert store.shard_path("m", 1, 0) is None


def test_a_bucket_without_its_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in [name for name in sys.modules if name.startswith(_OBJECTS)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(WeightSyncError) as caught:
        open_store("s3://bucket/x")
    assert caught.value.reason is Reason.NOT_SUPPORTED
    assert "weightsync[objects]" in caught.value.message


def test_fetchers_load_obstore_for_buckets_alone() -> None:
    code = "import sys, weightsync_server.workers.fetch.fetch_main; print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
