"""A store in a local directory; no other service is needed.

    <root>/weightsync-store.json              what this directory is
    <root>/<model>/epoch.json, marks.json
    <root>/<model>/v<version>/<shard>.safetensors, manifest.json, commit.json

Shards are byte for byte what was pushed. A version exists if and only if its commit record does.
What lies there of a push that is still open tells `weightsync_server.store.partial`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import stat
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.manifest import Manifest
from weightsync_server import files
from weightsync_server.faults import read_fault, write_fault
from weightsync_server.store.base import CommitRecord, check_epoch, check_model, check_version
from weightsync_server.store.files import read_document, replace, write_document
from weightsync_server.store.partial import RECORD, forget_push, is_partial, open_pushes
from weightsync_server.store.recovery import COMMIT, MANIFEST, recover, shard_name
from weightsync_server.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from weightsync_server.store.base import OpenPush, PushRecord

__all__ = ["LocalStore"]

logger = logging.getLogger(__name__)

_EPOCH = "epoch.json"
_MARKS = "marks.json"
_T = TypeVar("_T")


class LocalStore:
    """Keeps versions in a directory of the local host, or one that several hosts mount.

    Blocking calls run in threads. A cancelled call ends first, then raises.

    Args:
        root: The directory; `open` makes it.
    """

    durable = True

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.url = self._root.as_uri()
        self.lost: list[str] = []
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(self) -> list[CommitRecord]:
        """Recover, and return the committed versions by model and version."""
        try:
            records, self.lost = await in_thread(recover, self._root)
        except OSError as error:
            raise write_fault(error, f"opening the store {self._root}") from error
        return records

    def free_bytes(self) -> int:
        """Return what the disk has free for this user; blocks."""
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def shard_target(self, model: str, version: int, shard: int) -> str | None:
        """Return the path to persist a shard to."""
        return str(self._directory(model, version) / shard_name(shard))

    def shard_source(self, model: str, version: int, shard: int) -> str | None:
        """Return the path to load a shard from."""
        return self.shard_target(model, version, shard)

    async def commit(self, record: CommitRecord, manifest: Manifest) -> None:
        """Make a version exist, its shards having been persisted; when it raises, it does not.

        One exception that no local file system can avoid: where flushing the directory and then
        removing the record both fail, the version may be there after a crash, whole.
        """
        what = f"committing version {record.version} of {record.model}"
        await self._change(record.model, what, self._commit, record, manifest)

    async def discard(self, model: str, version: int) -> None:
        """Remove what a failed push left; a committed version stays untouched."""
        directory = self._directory(model, version)
        await self._change(model, f"discarding version {version} of {model}", _discard, directory)

    async def manifest(self, model: str, version: int) -> Manifest:
        """Return the manifest of a committed version, proved by the digest in its record."""
        what = f"reading the manifest of version {version} of {model}"
        try:
            return await in_thread(_read_manifest, self._directory(model, version))
        except FileNotFoundError:
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN, f"version {version} of {model} is not in the store"
            ) from None
        except OSError as error:
            raise read_fault(error, what) from error
        except ValueError as error:
            raise _damaged(what, error) from error

    async def delete(self, model: str, version: int) -> None:
        """Remove a version, its commit record first. An unknown one is fine."""
        directory = self._directory(model, version)
        await self._change(model, f"deleting version {version} of {model}", _delete, directory)

    async def read_epoch(self, model: str) -> int:
        """Return the newest epoch written; 0 before the first."""
        return await self._read(model, "the epoch", self._epoch, model)

    async def write_epoch(self, model: str, epoch: int) -> None:
        """Record an epoch: when this returns, older writers can no longer commit."""
        await self._change(model, f"recording an epoch of {model}", self._write_epoch, model, epoch)

    async def read_marks(self, model: str) -> dict[str, Any]:
        """Return what `write_marks` wrote last; empty before the first."""
        return await self._read(model, "the marks", _read_or, self._model(model) / _MARKS, {})

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        """Replace the marks, all or nothing."""
        path = self._model(model) / _MARKS
        what = f"recording marks of {model}"
        await self._change(model, what, _write_marks, path, dict(marks))

    async def record_push(self, record: PushRecord) -> None:
        """Write down that a push is open, until its version is committed or discarded."""
        path = self._directory(record.model, record.version) / RECORD
        what = f"recording a push of version {record.version}"
        await self._change(record.model, what, _record_push, path, record)

    async def open_pushes(self, model: str) -> list[OpenPush]:
        """Return the recorded pushes that were open when the store was last used."""
        return await self._read(model, "open pushes", open_pushes, self._model(model), COMMIT)

    def _model(self, model: str) -> Path:
        return self._root / check_model(model)

    def _directory(self, model: str, version: int) -> Path:
        return self._model(model) / f"v{check_version(version)}"

    async def _change(self, model: str, what: str, function: Callable[..., _T], *args: Any) -> _T:
        async with self._locks[check_model(model)]:
            try:
                return await in_thread(function, *args)
            except OSError as error:
                raise write_fault(error, what) from error
            except ValueError as error:
                raise _damaged(what, error) from error

    async def _read(self, model: str, what: str, function: Callable[..., _T], *args: Any) -> _T:
        try:
            return await in_thread(function, *args)
        except OSError as error:
            raise read_fault(error, f"reading {what} of {model}") from error
        except ValueError as error:
            raise _damaged(f"reading {what} of {model}", error) from error

    def _epoch(self, model: str) -> int:
        epoch = _read_or(self._model(model) / _EPOCH, {"epoch": 0}).get("epoch")
        if type(epoch) is not int:
            raise ValueError(f"the epoch is {epoch!r}")
        return epoch

    def _write_epoch(self, model: str, epoch: int) -> None:
        check_epoch(epoch, self._epoch(model))
        failpoints.hit("store.epoch")
        _write(self._model(model) / _EPOCH, {"epoch": epoch})

    def _commit(self, record: CommitRecord, manifest: Manifest) -> None:
        directory = self._directory(record.model, record.version)
        if not record.adopted:
            check_epoch(record.epoch, self._epoch(record.model))
        if _is_committed(directory, record):
            return
        sizes = [shard.size for shard in manifest.layout.shards]
        _check_shards(directory, record, sizes)
        body = manifest.to_json()
        # Also flushes the names of the shards, which are in the same directory.
        failpoints.hit("store.manifest")
        replace(directory / MANIFEST, body)
        files.flush_directory(directory.parent)
        files.flush_directory(self._root)
        try:
            failpoints.hit("store.record")
            write_document(
                directory / COMMIT,
                {
                    "format": 1,
                    "record": record.to_json(),
                    "manifest_bytes": len(body),
                    "manifest_xxh3_128": xxhash.xxh3_128_hexdigest(body),
                    "shard_bytes": sizes,
                },
            )
        except BaseException:
            # The record may be in place though its name could not be flushed.
            with contextlib.suppress(OSError):
                files.unlink(directory / COMMIT)
            raise
        forget_push(directory)


def _is_committed(directory: Path, record: CommitRecord) -> bool:
    try:
        known = CommitRecord.from_json(read_document(directory / COMMIT)["record"])
    except FileNotFoundError:
        return False
    except KeyError as error:
        raise ValueError("the commit record is incomplete") from error
    if known.content_digest != record.content_digest:
        raise WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"version {record.version} of {record.model} is committed with other content; push a "
            "higher version",
        )
    return True


def _check_shards(directory: Path, record: CommitRecord, sizes: Sequence[int]) -> None:
    expected = {shard_name(index): size for index, size in enumerate(sizes)}
    lacking = []
    for name, size in expected.items():
        try:
            status = (directory / name).lstat()
        except FileNotFoundError:
            lacking.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            lacking.append(f"{name} has {status.st_size} of {size} bytes")
    if lacking:
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"version {record.version} of {record.model} is not whole in the store: "
            f"{'; '.join(lacking[:10])}; push it again",
        )
    # An earlier try of the same version may have had more shards.
    for path in directory.iterdir():
        if path.name not in expected and not is_partial(path):
            files.unlink(path)


def _read_manifest(directory: Path) -> Manifest:
    commit = read_document(directory / COMMIT)
    body = (directory / MANIFEST).read_bytes()
    if xxhash.xxh3_128_hexdigest(body) != commit.get("manifest_xxh3_128"):
        raise ValueError("its digest does not match the commit record")
    return Manifest.from_json(body)


def _discard(directory: Path) -> None:
    if not (directory / COMMIT).exists() and directory.exists():
        shutil.rmtree(directory)


def _delete(directory: Path) -> None:
    if directory.exists():
        failpoints.hit("store.delete")
        files.unlink(directory / COMMIT)
        files.flush_directory(directory)
        # What cannot be removed is at the next start; the version is gone in any case.
        with contextlib.suppress(OSError):
            failpoints.hit("store.deleted")
            shutil.rmtree(directory)


def _record_push(path: Path, record: PushRecord) -> None:
    failpoints.hit("receive.record")
    _make_directory(path.parent.parent)
    _write(path, record.to_json())


def _write_marks(path: Path, marks: dict[str, Any]) -> None:
    failpoints.hit("store.marks")
    _write(path, marks)


def _read_or(path: Path, default: dict[str, Any]) -> dict[str, Any]:
    try:
        return read_document(path)
    except FileNotFoundError:
        return default


def _write(path: Path, document: dict[str, Any]) -> None:
    _make_directory(path.parent)
    write_document(path, document)


def _make_directory(path: Path) -> None:
    if not path.exists():
        path.mkdir(mode=0o750, exist_ok=True)
        files.flush_directory(path.parent)


def _damaged(what: str, error: ValueError) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT, f"{what} failed: {error}; restore the file from a backup or delete it"
    )
