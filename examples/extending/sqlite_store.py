"""A store whose records are rows of one SQLite database: it is looked into with any SQL client.

    <root>/versions.sqlite3                          what exists, epochs and marks
    <root>/<model>/v<version>/<shard>.safetensors    the bytes, which fetchers write and read

A version exists if and only if its row does, and a row is there whole or not at all. The row comes
last: what it needs has been flushed by then. Open pushes are not kept: after a restart they begin
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import write_fault
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store.local.version_files import (
    check_files,
    remove_unnamed,
    shard_name,
    shard_names,
)
from weightsync_server.store.protocol import check_epoch, check_model, check_version
from weightsync_server.store.store_records import CommitRecord, OpenPush, PushRecord, based

_DATABASE = "versions.sqlite3"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    model TEXT, version INTEGER, record TEXT NOT NULL, manifest BLOB NOT NULL, delta BLOB,
    PRIMARY KEY (model, version)
);
CREATE TABLE IF NOT EXISTS facts (
    model TEXT, name TEXT, value TEXT NOT NULL, PRIMARY KEY (model, name)
);
"""
_ROW = "SELECT record, manifest, delta FROM versions WHERE model=? AND version=?"
_VERSION = re.compile(r"v[1-9][0-9]*")
_T = TypeVar("_T")


class SqliteStore:
    """See `Store`. The `url` is `sqlite:///absolute/folder`; one server uses it at a time."""

    durable = True
    local = True

    def __init__(self, url: str) -> None:
        self.url = url
        self.lost: list[str] = []
        self._root = Path(unquote(urlsplit(url).path))

    async def open(self) -> list[CommitRecord]:
        return await self._run("opening the store", self._open)

    def free_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def shard_path(self, model: str, version: int, shard: int, *, delta: bool = False) -> str:
        return str(self._folder(model, version) / shard_name(shard, delta=delta))

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        self._folder(record.model, record.version)
        await self._run("committing a version", self._commit, record, manifest, delta)

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        await self._run("folding a version", self._fold, record, manifest)

    async def discard(self, model: str, version: int) -> None:
        await self._run("discarding a push", self._discard, self._folder(model, version))

    async def manifest(self, model: str, version: int) -> Manifest:
        record, manifest, _ = await self._read(model, version)
        found = Manifest.from_json(manifest)
        if found.manifest_digest != record.manifest_digest:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the manifest of version {version} of {model} is damaged; restore the database "
                "from a backup, or push the version again",
            )
        return found

    async def delta(self, model: str, version: int) -> Manifest:
        *_, delta = await self._read(model, version)
        if delta is None:
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN, f"version {version} of {model} is not kept as a delta"
            )
        return Manifest.from_json(delta)

    async def tidy(self, model: str, version: int) -> None:
        _, manifest, delta = await self._read(model, version)
        named = shard_names(Manifest.from_json(delta or manifest), delta=delta is not None)
        await self._run("tidying", _remove_others, self._folder(model, version), named)

    async def delete(self, model: str, version: int) -> None:
        await self._run("deleting a version", self._delete, self._folder(model, version))

    async def committed_elsewhere(self, model: str) -> list[CommitRecord]:
        check_model(model)
        return []

    async def collects(self, model: str) -> bool:
        check_model(model)
        return True

    async def read_epoch(self, model: str) -> int:
        return int(await self._run("reading the epoch", self._fact, check_model(model), "epoch", 0))

    async def write_epoch(self, model: str, epoch: int) -> None:
        await self._run("recording an epoch", self._write_epoch, check_model(model), epoch)

    async def read_marks(self, model: str) -> dict[str, Any]:
        return dict(await self._run("reading marks", self._fact, check_model(model), "marks", {}))

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        await self._run("recording marks", self._write_marks, check_model(model), dict(marks))

    async def record_push(self, record: PushRecord) -> None:
        # Fetchers write into it while shards arrive.
        folder = self._folder(record.model, record.version)
        await self._run("recording a push", partial(folder.mkdir, parents=True, exist_ok=True))

    async def open_pushes(self, model: str) -> list[OpenPush]:
        check_model(model)
        return []

    # What blocks runs in threads

    async def _run(self, what: str, function: Callable[..., _T], *args: Any) -> _T:
        try:
            return await in_thread(function, *args)
        except OSError as error:
            raise write_fault(error, what) from error
        except sqlite3.Error as error:
            raise WeightSyncError(
                Reason.FAULT, f"{what} failed: {error}; check the database and its disk"
            ) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All that is written in the block is durable after it, or nothing is."""
        opened = sqlite3.connect(self._root / _DATABASE, isolation_level=None)
        with contextlib.closing(opened) as database, database:
            # What follows a commit may rest on it: EXTRA flushes the journal's removal, too.
            database.execute("PRAGMA synchronous=EXTRA")
            database.execute("BEGIN IMMEDIATE")
            yield database

    def _folder(self, model: str, version: int) -> Path:
        return self._root / check_model(model) / f"v{check_version(version)}"

    def _open(self) -> list[CommitRecord]:
        self._root.mkdir(mode=0o750, parents=True, exist_ok=True)
        if any(self._root.iterdir()) and not (self._root / _DATABASE).exists():
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"{self._root} is somebody else's; name an empty folder"
            )
        with contextlib.closing(sqlite3.connect(self._root / _DATABASE)) as database:
            database.executescript(_SCHEMA)
        durable_files.flush_directory(self._root)
        durable_files.flush_directory(self._root.parent)
        self.lost = []
        kept: defaultdict[str, list[CommitRecord]] = defaultdict(list)
        with self._transaction() as database:
            for row in database.execute("SELECT record, manifest, delta FROM versions").fetchall():
                record, body, delta = _parsed(row)
                named = shard_names(Manifest.from_json(delta or body), delta=delta is not None)
                try:
                    check_files(self._folder(record.model, record.version), record, named)
                    kept[record.model].append(record)
                except WeightSyncError as error:
                    self._put_aside(database, record, error.message)
            for model, records in kept.items():
                kept[model], others = based(sorted(records, key=lambda one: one.version))
                for record in others:
                    self._put_aside(database, record, "its base is not there")
        for directory in self._root.glob("*/v*"):
            numbers = {record.version for record in kept[directory.parent.name]}
            if _VERSION.fullmatch(directory.name) and int(directory.name[1:]) not in numbers:
                shutil.rmtree(directory)
        return [record for model in sorted(kept) for record in kept[model]]

    def _put_aside(self, database: sqlite3.Connection, record: CommitRecord, why: str) -> None:
        directory = self._folder(record.model, record.version)
        with contextlib.suppress(FileNotFoundError):
            durable_files.rename(
                directory, directory.with_name(f"damaged-{directory.name}-{secrets.token_hex(4)}")
            )
        key = record.model, record.version
        database.execute("DELETE FROM versions WHERE model=? AND version=?", key)
        self.lost.append(f"{record.model}/v{record.version} is damaged ({why})")

    def _row(self, model: str, version: int) -> tuple[CommitRecord, bytes, bytes | None] | None:
        with self._transaction() as database:
            row = database.execute(_ROW, (model, version)).fetchone()
        return None if row is None else _parsed(row)

    async def _read(self, model: str, version: int) -> tuple[CommitRecord, bytes, bytes | None]:
        self._folder(model, version)
        row = await self._run("reading a version", self._row, model, version)
        if row is None:
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN, f"version {version} of {model} is not in the store"
            )
        return row

    def _commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        key = record.model, record.version
        shards = shard_names(delta or manifest, delta=delta is not None)
        body = delta.to_json() if delta is not None else None
        with self._transaction() as database:
            # In the same transaction as the row: nobody can take an epoch between the two.
            if not record.adopted:
                check_epoch(record.epoch, _value(database, record.model, "epoch", 0))
            if row := database.execute(_ROW, key).fetchone():
                if _parsed(row)[0].content_digest != record.content_digest:
                    raise WeightSyncError(
                        Reason.VERSION_CONFLICT,
                        f"version {record.version} of {record.model} is committed with other "
                        "content; push a higher version",
                    )
                return
            self._flush(record, shards)
            values = (*key, _json(record), manifest.to_json(), body)
            database.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?)", values)

    def _fold(self, record: CommitRecord, manifest: Manifest) -> None:
        named = shard_names(manifest)
        self._flush(record, named)
        values = _json(record), manifest.to_json(), record.model, record.version
        change = "UPDATE versions SET record=?, manifest=?, delta=NULL WHERE model=? AND version=?"
        with self._transaction() as database:
            database.execute(change, values)
        with contextlib.suppress(OSError):
            _remove_others(self._folder(record.model, record.version), named)

    def _flush(self, record: CommitRecord, named: Mapping[str, int]) -> None:
        """Make the names of shards durable, whose bytes fetchers have flushed already."""
        directory = self._folder(record.model, record.version)
        check_files(directory, record, named)
        # An earlier try of the same version may have had others; what was kept is needed no more.
        remove_unnamed(directory, named, partial=True)
        for folder in (directory, directory.parent, self._root):
            durable_files.flush_directory(folder)

    def _discard(self, directory: Path) -> None:
        if directory.exists() and self._row(directory.parent.name, int(directory.name[1:])) is None:
            shutil.rmtree(directory)

    def _delete(self, directory: Path) -> None:
        key = directory.parent.name, int(directory.name[1:])
        with self._transaction() as database:
            database.execute("DELETE FROM versions WHERE model=? AND version=?", key)
        # What cannot be removed is at the next start; the version is gone in any case.
        shutil.rmtree(directory, ignore_errors=True)

    def _fact(self, model: str, name: str, default: Any) -> Any:
        with self._transaction() as database:
            return _value(database, model, name, default)

    def _write_epoch(self, model: str, epoch: int) -> None:
        with self._transaction() as database:
            check_epoch(epoch, _value(database, model, "epoch", 0))
            _replace(database, model, "epoch", epoch)

    def _write_marks(self, model: str, marks: dict[str, Any]) -> None:
        with self._transaction() as database:
            _replace(database, model, "marks", marks)


def _json(record: CommitRecord) -> str:
    return json.dumps(record.to_json())


def _parsed(row: tuple[str, bytes, bytes | None]) -> tuple[CommitRecord, bytes, bytes | None]:
    record, manifest, delta = row
    return CommitRecord.from_json(json.loads(record)), manifest, delta


def _value(database: sqlite3.Connection, model: str, name: str, default: Any) -> Any:
    query = "SELECT value FROM facts WHERE model=? AND name=?"
    row = database.execute(query, (model, name)).fetchone()
    return default if row is None else json.loads(row[0])


def _replace(database: sqlite3.Connection, model: str, name: str, value: Any) -> None:
    database.execute("REPLACE INTO facts VALUES (?, ?, ?)", (model, name, json.dumps(value)))


def _remove_others(directory: Path, named: Mapping[str, int]) -> None:
    remove_unnamed(directory, named, partial=False)
