"""The objects of one model: commits, folds and deletions, each all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import xxhash

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.store.documents import encode_document
from weightsync_server.store.objects.object_catalog import ObjectCatalog
from weightsync_server.store.objects.object_collector import (
    UNCOMMITTED_FOR,
    remove_unnamed,
    store_time,
    sweep,
)
from weightsync_server.store.objects.object_fences import ObjectFence
from weightsync_server.store.objects.object_keys import RecordName, shard_key
from weightsync_server.store.objects.object_pushes import ObjectPushes
from weightsync_server.store.objects.stored_versions import StoredForm, StoredVersion
from weightsync_server.store.protocol import check_epoch

if TYPE_CHECKING:
    from weightsync_server.store.objects.object_client import ObjectClient
    from weightsync_server.store.objects.object_keys import ShardName
    from weightsync_server.store.store_records import CommitRecord

__all__ = ["ModelObjects"]

logger = logging.getLogger(__name__)

#: What is left of a shard's time when it is committed: no collector is that slow.
_MARGIN = timedelta(hours=1)
_SWEEP_S = 3600.0


class ModelObjects:
    """What a bucket has of one model. Whoever changes it does so alone on this server.

    Args:
        client: The store.
        model: Its name.
        server: Identity of this server.

    Attributes:
        lock: For whoever changes something.
        fence: Its epochs.
        pushes: Its open pushes.
        catalog: Its versions.
    """

    def __init__(self, client: ObjectClient, model: str, server: str) -> None:
        self.lock = asyncio.Lock()
        self.fence = ObjectFence(client, model, server)
        self.pushes = ObjectPushes(client, model, server)
        self.catalog = ObjectCatalog(client, model, self.fence)
        self._client = client
        self._model = model
        self._server = server
        self._swept_at = -_SWEEP_S

    async def collects(self) -> bool:
        """Return whether this server may remove versions: it has the epoch, or nobody has."""
        return await self.fence.holder() in ("", self._server)

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None
    ) -> None:
        """Make a version exist; see `Store.commit`."""
        while True:
            newest = await self.fence.newest()
            if not record.adopted:
                check_epoch(record.epoch, newest)
            if (known := await self.catalog.find(record.version)) is not None:
                self._take(record, known)
                return
            name = RecordName(record.version, newest if record.adopted else record.epoch)
            version = await self._prepared(name, record, manifest, delta)
            found = await self._client.create(self.catalog.key("versions", name), version.body())
            floor = await self.fence.floor()
            if floor.counts(name):
                break
            if not record.adopted:
                check_epoch(record.epoch, floor.epoch)
        if found != version.body():
            version = self._parsed(name, found)
        self._take(record, version)
        with contextlib.suppress(WeightSyncError):
            # What cannot be removed now is when pushes are looked for.
            await self.pushes.forget(record.version)

    def _take(self, record: CommitRecord, found: StoredVersion) -> None:
        if found.record.content_digest != record.content_digest:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {record.version} of {record.model} is committed with other content; "
                "push a higher version",
            )
        self.catalog.known[record.version] = found

    def _parsed(self, name: RecordName, body: bytes) -> StoredVersion:
        try:
            return StoredVersion.parse(name, body)
        except ValueError as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the record of version {name.version} is damaged: {error}; push a higher version",
            ) from error

    async def _prepared(
        self, name: RecordName, record: CommitRecord, manifest: Manifest, delta: Manifest | None
    ) -> StoredVersion:
        """Return a version all of whose objects are there, but for the record that counts."""
        shards, digest, changes = await asyncio.gather(
            self._shards(record, delta or manifest, delta=delta is not None),
            self._put_manifest(manifest),
            self._put_manifest(delta or manifest),
        )
        full = StoredForm(digest, () if delta else shards)
        form = StoredForm(changes, shards) if delta else None
        version = StoredVersion(name, record, full, form)
        await self._client.put(self.catalog.key("facts", name), version.facts())
        return version

    async def _put_manifest(self, manifest: Manifest) -> str:
        body = await asyncio.to_thread(manifest.to_json)
        digest = xxhash.xxh3_128_hexdigest(body)
        await self._client.put(self._manifest_key(digest), body)
        return digest

    async def _shards(
        self, record: CommitRecord, manifest: Manifest, *, delta: bool
    ) -> tuple[ShardName, ...]:
        """Return the names of uploaded shards, all of which are there, and for long enough.

        Raises:
            WeightSyncError: PUSH_INCOMPLETE, naming what is missing.
        """
        receipts = await self.pushes.receipts(record.version, delta=delta)
        sizes = [entry.size for entry in manifest.layout.shards]
        names = [receipts[index].object for index in range(len(sizes)) if index in receipts]
        keys = [shard_key(self._model, name) for name in names]
        facts = await asyncio.gather(*map(self._client.head, keys))
        there = dict(zip(names, facts, strict=True))
        latest = await store_time(self._client, self._clock) - UNCOMMITTED_FOR + _MARGIN
        lacking = []
        for index, size in enumerate(sizes):
            name = receipts[index].object if index in receipts else None
            found = there.get(name) if name is not None else None
            if found is None:
                lacking.append(f"shard {index} is missing")
            elif found.size != size:
                lacking.append(f"shard {index} has {found.size} of {size} bytes")
            elif found.modified < latest:
                lacking.append(f"shard {index} was sent too long ago")
        if lacking:
            raise WeightSyncError(
                Reason.PUSH_INCOMPLETE,
                f"version {record.version} of {record.model} is not whole in the store: "
                f"{'; '.join(lacking[:10])}; push it again",
            )
        return tuple(names)

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        """Keep a delta in full from now on; see `Store.fold`."""
        before = await self.catalog.find(record.version)
        if before is None:
            raise _unknown(self._model, record.version)
        if before.delta is None:
            return
        shards = await self._shards(record, manifest, delta=False)
        after = before.folded(record, shards)
        key = self.catalog.key("full", before.name)
        await self._client.put(key, encode_document(after.full.to_json()))
        self.catalog.known[record.version] = after
        with contextlib.suppress(WeightSyncError):
            # What cannot be removed now goes with the version.
            await self.pushes.forget_receipts(record.version, delta=False)
            await self._remove_shards(before)

    async def manifest(self, version: int, *, delta: bool) -> Manifest:
        """Return a manifest of a committed version, proved by the digest in its record."""
        known = self.catalog.known.get(version) or await self.catalog.find(version)
        form = None if known is None else known.delta if delta else known.full
        body = None
        if form is not None:
            body = await self._client.get(self._manifest_key(form.manifest))
        if form is None or body is None:
            raise _unknown(self._model, version)
        if xxhash.xxh3_128_hexdigest(body) != form.manifest:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the manifest of version {version} of {self._model} is damaged; restore the "
                "object or push the version anew",
            )
        return await asyncio.to_thread(Manifest.from_json, body)

    async def delete(self, version: int) -> None:
        """Remove a version, its record first; see `Store.delete`."""
        names = [name for name in await self.fence.records() if name.version == version]
        await self.pushes.forget(version)
        if not names:
            return
        if not await self.collects():
            raise WeightSyncError(
                Reason.EPOCH_STALE,
                f"another server that uses this store has the newest epoch of {self._model}; "
                f"delete version {version} there",
            )
        gone = await self.catalog.find(version)
        self.catalog.known.pop(version, None)
        await self._client.delete([self.catalog.key("versions", name) for name in names])
        keys = [self.catalog.key(folder, name) for folder in ("facts", "full") for name in names]
        with contextlib.suppress(WeightSyncError):
            # The version is gone; what cannot be removed now is when the store is swept.
            await self._client.delete(keys)
            await self._remove_shards(*([gone] if gone is not None else []))
        await self.sweep()

    async def _remove_shards(self, *gone: StoredVersion) -> None:
        await self.catalog.refresh()
        versions = self.catalog.known.values()
        await remove_unnamed(self._client, self._model, gone, versions, self.pushes)

    async def sweep(self) -> None:
        """Remove what no version needs, now and then, if this server may."""
        if time.monotonic() - self._swept_at < _SWEEP_S or self.catalog.damaged:
            # What a record that cannot be read names is not known, and stays.
            return
        self._swept_at = time.monotonic()
        try:
            if await self.collects():
                await self.catalog.refresh()
                versions = list(self.catalog.known.values())
                await sweep(self._client, self._model, self._clock, versions, self.pushes)
        except WeightSyncError as error:
            logger.warning("what no version of %s needs stays for now: %s", self._model, error)

    async def lost(self) -> dict[int, str]:
        """Return a sentence for each version of which objects are missing, by its number."""
        prefix = shard_key(self._model, "")
        found = await self._client.list_under(prefix.rstrip("/"))
        lost = dict(self.catalog.damaged)
        for number, version in self.catalog.known.items():
            for index, name in enumerate(version.kept.shards):
                facts = found.get(f"{prefix}{name}")
                if facts is None or facts.size != name.size:
                    lost[number] = f"{self._model}/v{number} is damaged (shard {index} is missing)"
        return lost

    @property
    def _clock(self) -> str:
        return f"{self._model}/clocks/{self._server}.json"

    def _manifest_key(self, digest: str) -> str:
        return f"{self._model}/manifests/{digest}.json"


def _unknown(model: str, version: int) -> WeightSyncError:
    return WeightSyncError(
        Reason.VERSION_UNKNOWN, f"version {version} of {model} is not in the store"
    )
