"""What a store keeps of deltas, and what it makes of them when it is opened."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import names
from tests.support.versions import Version, make_version
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops import durable_files
from weightsync_server.store import open_store
from weightsync_server.store.store_records import (
    CommitRecord,
    PushRecord,
    read_document,
    write_document,
)

if TYPE_CHECKING:
    from weightsync_server.store.protocol import Store


def write_delta(store: Store, delta: Version, version: int) -> None:
    for index, data in enumerate(delta.shards):
        target = Path(store.shard_path("m", version, index, delta=True) or "")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


async def committed(store: Store, version: int, base: int, **facts: Any) -> Version:
    """Commit a version as the change of another one; their bytes do not matter to a store."""
    told: dict[str, Any] = {}
    if base:
        told = {
            "base_version": base,
            "base_content_digest": make_version(base).record.content_digest,
            "delta_bytes": 7,
            "changed_elements": 5,
            "changed_fraction": 0.25,
        }
    made = make_version(version, **told | facts)
    if not base:
        made.write(store)
        await store.commit(made.record, made.manifest)
        return made
    delta = make_version(version + 100, shards=1)
    write_delta(store, delta, version)
    await store.commit(made.record, made.manifest, delta.manifest)
    return made


async def reopened(root: Path) -> list[int]:
    return [record.version for record in await open_store(str(root)).open()]


async def test_a_delta_is_there_after_a_restart(store: Store, root: Path) -> None:
    await committed(store, 1, 0)
    second = await committed(store, 2, 1)
    kept = ["commit.json", "delta-0.safetensors", "delta.json", "manifest.json"]
    assert names(root / "m" / "v2") == kept
    again = open_store(str(root))
    assert (await again.open())[1] == second.record
    assert await again.manifest("m", 2) == second.manifest
    assert await again.delta("m", 2) == make_version(102, shards=1).manifest
    with pytest.raises(WeightSyncError):
        await again.delta("m", 1)


async def test_records_of_earlier_releases_are_full_versions(store: Store, root: Path) -> None:
    await committed(store, 1, 0)
    path = root / "m" / "v1" / "commit.json"
    document = read_document(path)
    for name in ("base_version", "base_content_digest", "delta_bytes", "changed_fraction"):
        del document["record"][name]
    write_document(path, document)
    (record,) = await open_store(str(root)).open()
    assert (record.base_version, record.stored_bytes) == (0, record.size_bytes)
    told = PushRecord("id", "m", 1, 1, "00").to_json()
    del told["delta"]
    assert PushRecord.from_json(told).delta is False


def test_a_record_with_a_wrong_type_is_none() -> None:
    document = make_version(1).record.to_json()
    with pytest.raises(ValueError, match="base_version"):
        CommitRecord.from_json(document | {"base_version": "1"})


@pytest.mark.parametrize(
    "damage", ["delta-0.safetensors", "delta.json", "manifest.json", "commit.json"]
)
async def test_what_is_based_on_a_damaged_version_is_put_aside_with_it(
    store: Store, root: Path, damage: str
) -> None:
    for version in range(1, 5):
        await committed(store, version, version - 1)
    await committed(store, 5, 1)
    path = root / "m" / "v3" / damage
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    assert await reopened(root) == [1, 2, 5]
    aside = sorted(path.name.rpartition("-")[0] for path in (root / "m").glob("damaged-*"))
    assert aside == ["damaged-v3", "damaged-v4"]
    assert await reopened(root) == [1, 2, 5]


async def test_a_base_that_is_another_one_counts_for_none(store: Store, root: Path) -> None:
    await committed(store, 1, 0)
    await committed(store, 2, 1, base_content_digest="0" * 32)
    await committed(store, 3, 1, layout_digest="0" * 32)
    await committed(store, 4, 1)
    assert await reopened(root) == [1, 4]


async def test_folding_replaces_one_form_by_the_other(store: Store, root: Path) -> None:
    await committed(store, 1, 0)
    second = await committed(store, 2, 1)
    whole = replace(second.record, base_version=0, base_content_digest="", delta_bytes=0)
    with pytest.raises(WeightSyncError) as caught:
        await store.fold(whole, second.manifest)
    assert caught.value.reason is Reason.PUSH_INCOMPLETE
    second.write(store)
    await store.fold(whole, second.manifest)
    kept = ["0.safetensors", "1.safetensors", "commit.json", "manifest.json"]
    assert names(root / "m" / "v2") == kept
    records = await open_store(str(root)).open()
    assert records[1] == whole
    assert await store.manifest("m", 2) == second.manifest


class _Stop(BaseException):
    """The process ends here."""


class _Crash:
    """Ends the process at the Nth of the calls that change files, and at all after it."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int) -> None:
        self.calls = 0
        for name in ("fsync", "rename", "flush_directory", "unlink", "create", "write"):
            real = getattr(durable_files, name)

            def step(*args: Any, real: Any = real) -> Any:
                self.calls += 1
                if self.calls >= nth:
                    raise _Stop
                return real(*args)

            patch.setattr(durable_files, name, step)


async def test_a_crash_at_any_step_of_a_fold_leaves_one_whole_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = []
    for nth in range(1, 40):
        root = tmp_path / str(nth)
        store = open_store(str(root))
        await store.open()
        await committed(store, 1, 0)
        second = await committed(store, 2, 1)
        second.write(store)
        whole = replace(second.record, base_version=0, base_content_digest="", delta_bytes=0)
        with monkeypatch.context() as patch, contextlib.suppress(_Stop):
            crash = _Crash(patch, nth)
            await store.fold(whole, second.manifest)
        records = await open_store(str(root)).open()
        assert [record.version for record in records] == [1, 2]
        found = names(root / "m" / "v2")
        delta = bool(records[1].base_version)
        assert any(name.startswith("delta") for name in found) == delta
        assert ("0.safetensors" in found) != delta
        assert not any(name.endswith(".tmp") for name in found)
        forms.append(delta)
        if crash.calls < nth:
            break
    # Once it is folded, it stays so.
    assert forms == sorted(forms, reverse=True)
    assert (forms[0], forms[-1]) == (True, False)


async def test_what_a_fold_left_behind_is_removed(store: Store, root: Path) -> None:
    await committed(store, 1, 0)
    second = await committed(store, 2, 1)
    second.write(store)
    await store.tidy("m", 2)
    assert "0.safetensors" not in names(root / "m" / "v2")
    second.write(store)
    assert await reopened(root) == [1, 2]
    assert "0.safetensors" not in names(root / "m" / "v2")
    await store.tidy("m", 9)


async def test_an_earlier_try_of_the_other_kind_leaves_nothing(store: Store, root: Path) -> None:
    await committed(store, 1, 0)
    make_version(2).write(store)
    await committed(store, 2, 1)
    assert "0.safetensors" not in names(root / "m" / "v2")
    write_delta(store, make_version(103, shards=1), 3)
    await committed(store, 3, 0)
    assert not [name for name in names(root / "m" / "v3") if "delta" in name]


async def test_only_shards_of_its_kind_belong_to_an_open_push(store: Store, root: Path) -> None:
    await store.record_push(PushRecord("id", "m", 2, 1, "00", delta=True))
    folder = root / "m" / "v2"
    (folder / "0.safetensors").write_bytes(b"x")
    (folder / "0.safetensors.kept").write_bytes(b"x")
    (push,) = await open_store(str(root)).open_pushes("m")
    assert push.record.delta
    assert push.shards == ()


async def test_a_full_disk_keeps_the_delta(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await committed(store, 1, 0)
    second = await committed(store, 2, 1)
    second.write(store)
    whole = replace(second.record, base_version=0, base_content_digest="", delta_bytes=0)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable_files, "write", full)
    with pytest.raises(WeightSyncError) as caught:
        await store.fold(whole, second.manifest)
    assert caught.value.reason is Reason.DISK_EXHAUSTED
    monkeypatch.undo()
    assert (await open_store(str(root)).open())[1] == second.record
