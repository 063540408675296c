"""Follows a store that a plain web server shows: a folder of versions below an address.

The web server lists folders, as nginx with `autoindex on` or `python -m http.server` does. A shard
is copied to this host first, for a fetcher reads files; `TMPDIR` must have room for one version.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import quote

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store.local.version_files import (
    COMMIT,
    DELTA,
    MANIFEST,
    shard_name,
    shard_names,
)
from weightsync_server.store.store_records import CommitRecord, based, decode_document

_LINK = re.compile(r'href="(?:\./)?v([1-9][0-9]{0,15})/"')
_TIMEOUT_S = 20.0


class WebReader:
    """See `VersionReader`. Nothing that comes is believed: the server proves it by its digests."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._folder = tempfile.TemporaryDirectory(prefix="weightsync-web-")
        self._records: dict[int, CommitRecord] = {}

    async def committed(self, model: str) -> list[CommitRecord]:
        # What lacks its base, or comes round to itself, does not exist.
        found = [_record(body) for body in await in_thread(self._look, model)]
        whole, _ = based(sorted(found, key=lambda record: record.version))
        self._records = {record.version: record for record in whole}
        return [self._records[version] for version in sorted(self._records)]

    async def stamps(self, model: str) -> frozenset[str]:
        return frozenset(body.decode() for body in await in_thread(self._look, model))

    async def manifest(self, model: str, version: int) -> Manifest:
        # It is asked for before its shards, or those of the version that its chain begins with.
        found = await self._document(model, version, MANIFEST)
        begin = version
        while record := self._records[begin].base_version:
            begin = record
        await in_thread(self._copy, model, begin, shard_names(found))
        return found

    async def delta(self, model: str, version: int) -> Manifest:
        found = await self._document(model, version, DELTA)
        await in_thread(self._copy, model, version, shard_names(found, delta=True))
        return found

    def shard_path(self, model: str, version: int, shard: int, *, delta: bool = False) -> str:
        return str(self._place(model, version) / shard_name(shard, delta=delta))

    def pieces(self, model: str, version: int, shard: int, *, delta: bool = False) -> None:
        """Return None: there is no cache before it."""

    async def _document(self, model: str, version: int, name: str) -> Manifest:
        try:
            return Manifest.from_json(await in_thread(self._get, f"{model}/v{version}/{name}"))
        except (FileNotFoundError, ValueError) as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"{name} of version {version} cannot be used: {error}; push again",
            ) from error

    def _place(self, model: str, version: int) -> Path:
        return Path(self._folder.name, model, f"v{version}")

    def _look(self, model: str) -> list[bytes]:
        """Return the commit records that lie there now; what is gone meanwhile is passed over."""
        try:
            page = self._get(f"{model}/").decode()
        except FileNotFoundError:
            return []
        found = []
        for number in sorted(set(_LINK.findall(page)), key=int):
            try:
                found.append(self._get(f"{model}/v{number}/{COMMIT}"))
            except FileNotFoundError:
                continue
        return found

    def _copy(self, model: str, version: int, names: dict[str, int]) -> None:
        place = self._place(model, version)
        for other in place.parent.glob("v*"):
            if other != place:
                shutil.rmtree(other)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            target = place / name
            # One that is cut off has another length, which the fetcher refuses.
            with self._opened(f"{model}/v{version}/{name}") as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)

    def _get(self, path: str) -> bytes:
        with self._opened(path) as answer:
            return answer.read()

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[HTTPResponse]:
        url = f"{self.url}/{quote(path)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - READERS has http alone
                yield answer
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(url) from error
            raise _away(url, error) from error
        except (OSError, HTTPException) as error:
            raise _away(url, error) from error


def _record(body: bytes) -> CommitRecord:
    try:
        return CommitRecord.from_json(decode_document(body)["record"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(
            Reason.DATA_CORRUPT, f"a commit record is damaged ({error}); look at its store"
        ) from error


def _away(url: str, error: Exception) -> WeightSyncError:
    return WeightSyncError(Reason.FAULT, f"{url} cannot be read ({error}); look at its web server")
