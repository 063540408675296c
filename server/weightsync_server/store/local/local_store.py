"""A store in a local directory; no other service is needed.

    <root>/weightsync-store.json              what this directory is
    <root>/<model>/epoch.json, marks.json
    <root>/<model>/v<version>/<shard>.safetensors, manifest.json, commit.json

Shards are byte for byte what was pushed, in full or as a delta. A version exists if and only if its
commit record does, which tells what else must be there (see `version_files`). What lies there of a
push that is still open tells `open_pushes`.

For a reader, what is gone when its turn comes is passed over, and so is a record that cannot be
read: the owner tells of damage. A record shows as soon as it has its name, which a crash of the
owner may still take back; so its directory is flushed here before it is believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import read_fault, write_fault
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store.local.open_pushes import (
    RECORD,
    forget_push,
    is_foreign,
    open_pushes,
    read_push,
)
from weightsync_server.store.local.recovery import MARKER, recover
from weightsync_server.store.local.version_files import (
    COMMIT,
    DELTA,
    MANIFEST,
    check_files,
    commit_document,
    lengths,
    read_manifest,
    remove_unnamed,
    shard_name,
    shard_names,
    write_manifests,
)
from weightsync_server.store.protocol import check_epoch, check_model, check_version
from weightsync_server.store.store_records import (
    CommitRecord,
    OpenPush,
    PushRecord,
    read_document,
    write_document,
)

logger = logging.getLogger(__name__)


_VERSION = re.compile(r"v([1-9][0-9]{0,15})")
#: What a file system says that has nothing to flush in a directory: its server does it in time.
_NOTHING_TO_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EROFS})


def _flush(directory: Path) -> None:
    try:
        durable_files.flush_directory(directory)
    except OSError as error:
        if error.errno not in _NOTHING_TO_FLUSH:
            raise


def _record(directory: Path) -> CommitRecord | None:
    try:
        record = CommitRecord.from_json(read_document(directory / COMMIT)["record"])
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is skipped: its commit record is damaged (%s)", directory, error)
        return None
    same = (record.model, f"v{record.version}") == (directory.parent.name, directory.name)
    return record if same else None


def _directories(root: Path, model: str) -> Iterator[Path]:
    if not (root / MARKER).exists():
        raise WeightSyncError(
            Reason.FAULT,
            f"{root} is not a store of versions; give the path at which this host mounts the "
            "store of the server that takes the pushes",
        )
    try:
        entries = sorted((root / model).iterdir())
    except FileNotFoundError:
        return
    yield from (entry for entry in entries if _VERSION.fullmatch(entry.name))


_EPOCH = "epoch.json"
_MARKS = "marks.json"
_T = TypeVar("_T")


class LocalStore:
    """Keeps versions in a directory of the local host, or one that several hosts mount.

    A cancelled call ends first, then raises. Open pushes of other servers are left alone.
    """

    durable = True
    local = True

    def __init__(self, root: Path, server: str = "") -> None:
        self._root = root.absolute()
        self._server = server
        self.url = self._root.as_uri()
        self.lost: list[str] = []
        #: What was read of each record that was there at the last look, by several threads.
        self._known: dict[str, CommitRecord | None] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(self) -> list[CommitRecord]:
        try:
            records, self.lost = await in_thread(recover, self._root, self._server)
        except OSError as error:
            raise write_fault(error, f"opening the store {self._root}") from error
        return records

    def free_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def shard_path(self, model: str, version: int, shard: int, *, delta: bool = False) -> str:
        return str(self._directory(model, version) / shard_name(shard, delta=delta))

    def pieces(self, model: str, version: int, shard: int, *, delta: bool = False) -> None:
        """Return None: what reads files reads no cache."""

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        """See `Store.commit`; no local file system can avoid one more case.

        If flushing the directory and removing the record both fail, a crash may leave the version,
        whole.
        """
        what = f"committing version {record.version} of {record.model}"
        await self._change(record.model, what, self._commit, record, manifest, delta)

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        directory = self._directory(record.model, record.version)
        what = f"folding version {record.version} of {record.model}"
        await self._change(record.model, what, _fold, directory, record, manifest)

    async def discard(self, model: str, version: int) -> None:
        directory = self._directory(model, version)
        what = f"discarding version {version} of {model}"
        await self._change(model, what, _discard, directory, self._server)

    async def manifest(self, model: str, version: int) -> Manifest:
        """Return the manifest of a committed version, proved by the digest in its record."""
        return await self._manifest(model, version, MANIFEST)

    async def delta(self, model: str, version: int) -> Manifest:
        return await self._manifest(model, version, DELTA)

    async def _manifest(self, model: str, version: int, name: str) -> Manifest:
        what = f"reading the manifest of version {version} of {model}"
        try:
            return await in_thread(read_manifest, self._directory(model, version), name)
        except FileNotFoundError:
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN, f"version {version} of {model} is not in the store"
            ) from None
        except OSError as error:
            raise read_fault(error, what) from error
        except ValueError as error:
            raise _damaged(what, error) from error

    async def tidy(self, model: str, version: int) -> None:
        directory = self._directory(model, version)
        await self._change(model, f"tidying version {version} of {model}", _tidy, directory)

    async def delete(self, model: str, version: int) -> None:
        directory = self._directory(model, version)
        await self._change(model, f"deleting version {version} of {model}", _delete, directory)

    async def committed_elsewhere(self, model: str) -> list[CommitRecord]:
        """Return nothing: a folder is looked through when it is opened, and recovered with that."""
        check_model(model)
        return []

    async def committed(self, model: str) -> list[CommitRecord]:
        return await self._read(model, "versions", self._versions, model)

    async def stamps(self, model: str) -> frozenset[str]:
        """Return names that change whenever a version comes, goes or is kept in another form."""
        return await self._read(model, "versions", self._stamps, model)

    async def collects(self, model: str) -> bool:
        """Return True: a folder does not know who has an epoch."""
        check_model(model)
        return True

    async def read_epoch(self, model: str) -> int:
        return await self._read(model, "the epoch", self._epoch, model)

    async def write_epoch(self, model: str, epoch: int) -> None:
        await self._change(model, f"recording an epoch of {model}", self._write_epoch, model, epoch)

    async def read_marks(self, model: str) -> dict[str, Any]:
        return await self._read(model, "the marks", _read_or, self._model(model) / _MARKS, {})

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        path = self._model(model) / _MARKS
        what = f"recording marks of {model}"
        await self._change(model, what, _write_marks, path, dict(marks))

    async def record_push(self, record: PushRecord) -> None:
        directory = self._directory(record.model, record.version)
        what = f"recording a push of version {record.version}"
        ours = replace(record, server=self._server)
        await self._change(record.model, what, _record_push, directory, ours)

    async def open_pushes(self, model: str) -> list[OpenPush]:
        args = self._model(model), COMMIT, self._server
        return await self._read(model, "open pushes", open_pushes, *args)

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

    def _stamps(self, model: str) -> frozenset[str]:
        return frozenset(stamp for stamp, _ in self._stamped(model))

    def _versions(self, model: str) -> list[CommitRecord]:
        """Return the committed versions of a model, by number; all of them survive a crash."""
        known: dict[str, CommitRecord | None] = {}
        for stamp, directory in self._stamped(model):
            if stamp in self._known:
                known[stamp] = self._known[stamp]
                continue
            try:
                record = _record(directory)
                # Afterwards: then what was read is what lasts.
                _flush(directory)
            except FileNotFoundError:
                continue
            known[stamp] = record
        self._known = known
        found = (record for record in known.values() if record is not None)
        return sorted(found, key=lambda record: record.version)

    def _stamped(self, model: str) -> Iterator[tuple[str, Path]]:
        for directory in _directories(self._root, model):
            try:
                status = (directory / COMMIT).stat()
            except FileNotFoundError:
                continue
            # Each write of a record makes a new file.
            yield f"{model}/{directory.name}-{status.st_ino}-{status.st_mtime_ns}", directory

    def _epoch(self, model: str) -> int:
        epoch = _read_or(self._model(model) / _EPOCH, {"epoch": 0}).get("epoch")
        if type(epoch) is not int:
            raise ValueError(f"the epoch is {epoch!r}")
        return epoch

    def _write_epoch(self, model: str, epoch: int) -> None:
        check_epoch(epoch, self._epoch(model))
        failpoints.hit("store.epoch")
        _write(self._model(model) / _EPOCH, {"epoch": epoch})

    def _commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        directory = self._directory(record.model, record.version)
        if not record.adopted:
            check_epoch(record.epoch, self._epoch(record.model))
        if _is_committed(directory, record):
            return
        shards = shard_names(delta or manifest, delta=delta is not None)
        check_files(directory, record, shards)
        # An earlier try of the same version may have had more shards, or others.
        remove_unnamed(directory, shards, partial=False)
        bodies = write_manifests(directory, manifest, delta)
        durable_files.flush_directory(directory.parent)
        durable_files.flush_directory(self._root)
        try:
            failpoints.hit("store.record")
            write_document(directory / COMMIT, commit_document(record, shards, *bodies))
        except BaseException:
            # The record may be in place though its name could not be flushed.
            with contextlib.suppress(OSError):
                durable_files.unlink(directory / COMMIT)
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


def _fold(directory: Path, record: CommitRecord, manifest: Manifest) -> None:
    shards = shard_names(manifest)
    check_files(directory, record, shards)
    body = _manifest_body(directory, manifest)
    # The names of the whole shards are durable before the record that needs them.
    durable_files.flush_directory(directory)
    failpoints.hit("delta.fold")
    write_document(directory / COMMIT, commit_document(record, shards, body, b""))
    with contextlib.suppress(OSError):
        failpoints.hit("delta.folded")
        # What cannot be removed is at the next start.
        remove_unnamed(directory, shards, partial=False)


def _manifest_body(directory: Path, manifest: Manifest) -> bytes:
    """Return the manifest as it is stored; one that is damaged there is written anew."""
    try:
        read_manifest(directory, MANIFEST)
        return (directory / MANIFEST).read_bytes()
    except (FileNotFoundError, ValueError):
        return write_manifests(directory, manifest, None)[0]


def _tidy(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove_unnamed(directory, lengths(read_document(directory / COMMIT)), partial=False)


def _discard(directory: Path, server: str) -> None:
    if (directory / COMMIT).exists() or not directory.exists():
        return
    if not is_foreign(read_push(directory), server):
        shutil.rmtree(directory)


def _delete(directory: Path) -> None:
    if directory.exists():
        failpoints.hit("store.delete")
        durable_files.unlink(directory / COMMIT)
        durable_files.flush_directory(directory)
        # What cannot be removed is at the next start; the version is gone in any case.
        with contextlib.suppress(OSError):
            failpoints.hit("store.deleted")
            shutil.rmtree(directory)


def _record_push(directory: Path, record: PushRecord) -> None:
    failpoints.hit("receive.record")
    # Its bytes would be written over theirs.
    if (directory / COMMIT).exists() or is_foreign(read_push(directory), record.server):
        raise WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"version {record.version} of {record.model} is being or was pushed through another "
            "server that uses this store; push there, or push it as a higher version",
        )
    _make_directory(directory.parent)
    _write(directory / RECORD, record.to_json())


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
        durable_files.flush_directory(path.parent)


def _damaged(what: str, error: ValueError) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT, f"{what} failed: {error}; restore the file from a backup or delete it"
    )
