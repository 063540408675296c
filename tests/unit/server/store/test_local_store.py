"""The local store: its files, its recovery and its refusals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open

from tests.support.processes import names
from tests.support.versions import make_version
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.store.protocol import Store


async def _reopened(root: Path) -> list[int]:
    return [record.version for record in await open_store(str(root)).open()]


async def test_the_files_are_what_safetensors_tools_read(
    store: Store, root: Path, persisted: Callable[..., Any]
) -> None:
    version = persisted(7)
    await store.commit(version.record, version.manifest)
    directory = root / "m" / "v7"
    assert names(directory) == ["0.safetensors", "1.safetensors", "commit.json", "manifest.json"]
    for index, data in enumerate(version.shards):
        assert (directory / f"{index}.safetensors").read_bytes() == data
    with safe_open(directory / "1.safetensors", "np") as file:
        assert file.get_tensor("s1.t2").shape == (3, 5)


async def test_37000_tensors(store: Store, persisted: Callable[..., Any]) -> None:
    version = persisted(shards=1, tensors=37_000)
    await store.commit(version.record, version.manifest)
    assert await store.manifest("m", 1) == version.manifest


class _Failing:
    """Fails the Nth of the calls that make files durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nth: int, code: int) -> None:
        self.calls = 0
        for name in ("fsync", "replace"):
            real = getattr(os, name)

            def counted(*args: Any, real: Callable[..., None] = real) -> None:
                self.calls += 1
                if self.calls == nth:
                    raise OSError(code, os.strerror(code))
                real(*args)

            monkeypatch.setattr(os, name, counted)


async def test_a_commit_that_fails_at_any_step_leaves_no_version(
    store: Store, root: Path, persisted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    for nth in range(1, 100):
        version = persisted(nth)
        with monkeypatch.context() as patch:
            failing = _Failing(patch, nth, errno.EIO)
            (outcome,) = await asyncio.gather(
                store.commit(version.record, version.manifest), return_exceptions=True
            )
        if outcome is None:
            steps = failing.calls
            break
        assert isinstance(outcome, WeightSyncError)
        assert outcome.reason == Reason.FAULT
        with pytest.raises(WeightSyncError) as caught:
            await store.manifest("m", nth)
        assert caught.value.reason == Reason.VERSION_UNKNOWN
        # The same store can commit it after all, and a new one sees nothing of a discarded one.
        if nth % 2:
            await store.commit(version.record, version.manifest)
            assert await _reopened(root) == [nth]
            await store.delete("m", nth)
        else:
            await store.discard("m", nth)
        assert await _reopened(root) == []
        assert names(root / "m") == []
    # manifest, its name, the version's name, the model's; record, its name.
    assert steps == 8


async def test_a_crash_at_any_step_leaves_a_whole_version_or_none(
    store: Store, root: Path, persisted: Callable[..., Any]
) -> None:
    seen = []
    for nth in range(1, 10):
        version = persisted(nth)
        if not _crash(root, version, nth):
            break
        found = await _reopened(root)
        seen.append(found == [nth])
        if found:
            assert await store.manifest("m", nth) == version.manifest
            await store.delete("m", nth)
        assert names(root / "m") == []
    # Only after the record has got its name; before, nothing is visible.
    assert seen == [False] * 7 + [True]
    assert await _reopened(root) == [9]


def _crash(root: Path, version: Any, nth: int) -> bool:
    """Commit in a process that dies just before the Nth step; tell whether it died."""
    with warnings.catch_warnings():
        # The process has threads; the child touches nothing that they might hold locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        calls = 0
        for name in ("fsync", "replace"):
            real = getattr(os, name)

            def counted(*args: Any, real: Callable[..., None] = real) -> None:
                nonlocal calls
                calls += 1
                if calls == nth:
                    os._exit(9)
                real(*args)

            setattr(os, name, counted)
        code = 1
        try:
            # No event loop: its threads would not survive the fork.
            open_store(str(root))._commit(version.record, version.manifest)  # type: ignore[attr-defined]
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


async def test_opening_removes_leftovers_and_nothing_else(
    store: Store, root: Path, persisted: Callable[..., Any], tmp_path: Path
) -> None:
    version = persisted(1)
    await store.commit(version.record, version.manifest)
    await store.write_epoch("m", 4)
    persisted(2)
    (root / "m" / "v1" / "0.safetensors.ab12.tmp").touch()
    (root / "m" / "epoch.json.ab12.tmp").touch()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    (root / "m" / "v3").symlink_to(theirs)
    for other in ("v0", "v01", "v9007199254740992", "notes", "v3.bak"):
        (root / "m" / other).mkdir()
    (root / ".hidden" / "v5").mkdir(parents=True)
    assert await _reopened(root) == [1]
    assert names(root / "m" / "v1") == [
        "0.safetensors", "1.safetensors", "commit.json", "manifest.json",
    ]  # fmt: skip
    assert set(names(root / "m")) == {
        "v1", "epoch.json", "v3", "v0", "v01", "v9007199254740992", "notes", "v3.bak",
    }  # fmt: skip
    assert names(root / ".hidden") == ["v5"]
    assert names(theirs) == ["file"]


async def test_a_directory_that_is_no_store_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "project" / "v1").mkdir(parents=True)
    with pytest.raises(WeightSyncError) as caught:
        await open_store(str(tmp_path)).open()
    assert caught.value.reason == Reason.REQUEST_INVALID
    assert names(tmp_path) == ["project"]
    assert names(tmp_path / "project") == ["v1"]


async def test_an_empty_file_system_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "weightsync-store.json.12.tmp").touch()
    assert await _reopened(tmp_path) == []
    assert names(tmp_path) == ["lost+found", "weightsync-store.json"]
    (tmp_path / "weightsync-store.json").write_text("{}")
    with pytest.raises(WeightSyncError) as caught:
        await _reopened(tmp_path)
    assert caught.value.reason == Reason.NOT_SUPPORTED


def _shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("0.safetensors", _shorten),
        ("1.safetensors", Path.unlink),
        ("manifest.json", _shorten),
        ("manifest.json", Path.unlink),
        ("commit.json", _shorten),
        ("commit.json", _flip),
        ("commit.json", lambda path: path.write_bytes(b"")),
        ("commit.json", lambda path: path.write_bytes(b"[1]")),
    ],
)
async def test_a_damaged_version_is_put_aside(
    name: str,
    damage: Callable[[Path], None],
    store: Store,
    root: Path,
    persisted: Callable[..., Any],
) -> None:
    for number in (1, 2):
        version = persisted(number)
        await store.commit(version.record, version.manifest)
    damage(root / "m" / "v2" / name)
    assert await _reopened(root) == [1]
    assert [entry[:11] for entry in names(root / "m")] == ["damaged-v2-", "v1"]
    version.write(store)
    await store.commit(version.record, version.manifest)
    assert await _reopened(root) == [1, 2]


async def test_a_changed_manifest_is_found_when_it_is_read(
    store: Store, root: Path, persisted: Callable[..., Any]
) -> None:
    version = persisted()
    await store.commit(version.record, version.manifest)
    path = root / "m" / "v1" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"s0.t1", b"s0.t9"))
    assert await _reopened(root) == [1]
    with pytest.raises(WeightSyncError) as caught:
        await store.manifest("m", 1)
    assert caught.value.reason == Reason.DATA_CORRUPT


@pytest.mark.parametrize("name", ["epoch", "marks"])
async def test_a_damaged_epoch_or_mark_is_never_taken_for_none(
    name: str, store: Store, root: Path
) -> None:
    await store.write_epoch("m", 4)
    await store.write_marks("m", {"pinned": [4]})
    path = root / "m" / f"{name}.json"
    frame = json.loads(path.read_text())
    frame["document"] = {name: 3}
    for damaged in (json.dumps(frame), "", "{}", '{"document":{}}'):
        path.write_text(damaged)
        with pytest.raises(WeightSyncError) as caught:
            await (store.read_epoch("m") if name == "epoch" else store.read_marks("m"))
        assert caught.value.reason == Reason.DATA_CORRUPT
        assert damaged == path.read_text()
    if name == "epoch":
        version = make_version(epoch=9)
        version.write(store)
        with pytest.raises(WeightSyncError):
            await store.commit(version.record, version.manifest)
        assert await _reopened(root) == []


async def test_an_epoch_survives(store: Store, root: Path) -> None:
    await store.write_epoch("m", 3)
    assert await open_store(str(root)).read_epoch("m") == 3


@pytest.mark.parametrize("spoil", [_shorten, Path.unlink])
async def test_a_version_that_is_not_whole_is_not_committed(
    spoil: Callable[[Path], None], store: Store, root: Path, persisted: Callable[..., Any]
) -> None:
    version = persisted()
    spoil(root / "m" / "v1" / "1.safetensors")
    with pytest.raises(WeightSyncError) as caught:
        await store.commit(version.record, version.manifest)
    assert caught.value.reason == Reason.PUSH_INCOMPLETE
    assert "1.safetensors" in caught.value.message
    assert await _reopened(root) == []


async def test_shards_of_an_earlier_try_are_not_committed(
    store: Store, root: Path, persisted: Callable[..., Any]
) -> None:
    persisted(shards=4)
    version = persisted(shards=2)
    await store.commit(version.record, version.manifest)
    assert "2.safetensors" not in names(root / "m" / "v1")


async def test_a_full_disk_fails_the_commit_cleanly(
    store: Store, root: Path, persisted: Callable[..., Any]
) -> None:
    version = persisted()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(WeightSyncError) as caught:
            await store.commit(version.record, version.manifest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.reason == Reason.DISK_EXHAUSTED
    assert "this process may write 100 bytes per file" in caught.value.message
    assert names(root / "m" / "v1") == ["0.safetensors", "1.safetensors"]
    await store.commit(version.record, version.manifest)
    assert await _reopened(root) == [1]


async def test_a_deletion_that_is_interrupted_is_finished_later(
    store: Store, root: Path, persisted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = persisted()
    await store.commit(version.record, version.manifest)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        # Its record is gone for good, and with it the version.
        await store.delete("m", 1)
    assert "0.safetensors" in names(root / "m" / "v1")
    assert await _reopened(root) == []
    assert names(root / "m") == []


async def test_a_cancelled_commit_is_over_when_its_caller_learns_it(
    store: Store, root: Path, persisted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = persisted()
    real, go = os.fsync, threading.Event()

    def slow(fd: int) -> None:
        go.wait(10)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    committing = asyncio.create_task(store.commit(version.record, version.manifest))
    await asyncio.sleep(0.05)
    committing.cancel()
    await asyncio.sleep(0.05)
    assert not committing.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert await _reopened(root) == [1]


async def test_an_unreadable_store_is_refused_and_nothing_is_put_aside(
    store: Store, root: Path, persisted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = persisted()
    await store.commit(version.record, version.manifest)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(WeightSyncError) as caught:
            await _reopened(root)
    assert caught.value.reason == Reason.DISK_EXHAUSTED
    assert await _reopened(root) == [1]
