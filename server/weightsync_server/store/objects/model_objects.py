"""The objects of one model: commits, folds and deletions, each all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import timedelta

import xxhash

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.store.objects.object_catalog import (
    UNCOMMITTED_FOR,
    ObjectCatalog,
    StoredForm,
    StoredVersion,
    store_time,
)
from weightsync_server.store.objects.object_client import ObjectClient
from weightsync_server.store.objects.object_fences import ObjectFence
from weightsync_server.store.objects.object_keys import RecordName, shard_key
from weightsync_server.store.objects.object_pushes import ObjectPushes
from weightsync_server.store.objects.piece_digests import ShardReceipt
from weightsync_server.store.protocol import check_epoch
from weightsync_server.store.store_records import CommitRecord, encode_document

logger = logging.getLogger(__name__)

#: What is left of a shard's time when it is committed: no collector is that slow.
_MARGIN = timedelta(hours=1)
_SWEEP_S = 3600.0


class ModelObjects:
    """What a bucket has of one model. Any task that changes something must hold `lock`."""

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
        return await self.fence.holder() == self._server

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None
    ) -> None:
        while True:
            if not record.adopted:
                await self.fence.claim(record.epoch)
            # Before the version is looked for: what does not count of older epochs never will.
            newest = (await self.fence.floor()).epoch
            if not record.adopted:
                check_epoch(record.epoch, newest)
            if (known := await self.catalog.find(record.version)) is not None:
                await self._take(known, record, manifest, delta)
                return
            name = RecordName(record.version, newest)
            version = await self._prepared(name, record, manifest, delta)
            found = await self._client.create(self.catalog.key("versions", name), version.body())
            if (await self.fence.floor()).counts(name):
                break
        if found != version.body():
            version = self._parsed(name, found)
        await self._take(version, record, manifest, delta)
        with contextlib.suppress(WeightSyncError):
            # What cannot be removed now is when pushes are looked for.
            await self.pushes.forget(record.version)

    async def _take(
        self,
        found: StoredVersion,
        record: CommitRecord,
        manifest: Manifest,
        delta: Manifest | None,
    ) -> None:
        """Know a version from now on, if it is what was to be committed, in the same form."""
        digest, _ = await asyncio.to_thread(_encoded, manifest)
        theirs = found.record.content_digest, found.record.base_version, found.full.manifest
        same = theirs == (record.content_digest, record.base_version, digest)
        if not same or (found.delta is None) != (delta is None):
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {record.version} of {record.model} is committed with other content, or "
                "in another form; push a higher version",
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
        full = StoredForm.of(digest, () if delta else shards)
        form = StoredForm.of(changes, shards) if delta else None
        version = StoredVersion(name, record, full, form)
        await self._client.put(self.catalog.facts_key(name, version.body()), version.facts())
        return version

    async def _put_manifest(self, manifest: Manifest) -> str:
        digest, body = await asyncio.to_thread(_encoded, manifest)
        await self._client.put(self.catalog.manifest_key(digest), body)
        return digest

    async def _shards(
        self, record: CommitRecord, manifest: Manifest, *, delta: bool
    ) -> list[ShardReceipt]:
        """Return the receipts of uploaded shards, all of which are there, and for long enough."""
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
        return [receipts[index] for index in range(len(sizes))]

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        await self._check_changes()
        before = await self.catalog.find(record.version)
        if before is None:
            raise _unknown(self._model, record.version)
        if before.delta is None:
            return
        shards = await self._shards(record, manifest, delta=False)
        after = before.folded(record, StoredForm.of(before.full.manifest, shards))
        key = self.catalog.key("full", before.name)
        await self._client.put(key, encode_document(after.full.to_json()))
        self.catalog.known[record.version] = after
        with contextlib.suppress(WeightSyncError):
            # What cannot be removed now goes with the version.
            await self.pushes.forget_receipts(record.version, delta=False)
            await self.catalog.remove_unnamed(before, self.pushes)

    async def manifest(self, version: int, *, delta: bool) -> Manifest:
        """Return a manifest of a committed version, proved by the digest in its record."""
        known = self.catalog.known.get(version) or await self.catalog.find(version)
        form = None if known is None else known.delta if delta else known.full
        body = None
        if form is not None:
            body = await self._client.get(self.catalog.manifest_key(form.manifest))
        if form is None or body is None:
            raise _unknown(self._model, version)
        if xxhash.xxh3_128_hexdigest(body) != form.manifest:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the manifest of version {version} of {self._model} is damaged; restore the "
                "object or push the version again",
            )
        try:
            return await asyncio.to_thread(Manifest.from_json, body)
        except ValueError as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the manifest of version {version} of {self._model} cannot be read ({error}); "
                "push the version again",
            ) from error

    async def delete(self, version: int) -> None:
        """Remove a version, its record first; no epoch guards a removal itself.

        A server that is stopped between its checks and its request may, when it goes on, remove a
        version that another server has based a delta on since.
        """
        names = [name for name in await self.fence.records() if name.version == version]
        await self.pushes.forget(version)
        if not names:
            return
        await self._check_changes()
        await self.catalog.refresh()
        gone = self.catalog.known.get(version)
        if gone is not None:
            self._check_not_a_base(gone)
        await self._client.delete([self.catalog.key("versions", name) for name in names])
        self.catalog.known.pop(version, None)
        self.catalog.damaged.pop(version, None)
        with contextlib.suppress(WeightSyncError):
            # The version is gone; what cannot be removed now is when the store is swept.
            facts = await self._client.list_under(f"{self._model}/facts/{version}")
            await self._client.delete([*facts, *(self.catalog.key("full", one) for one in names)])
            if gone is not None:
                await self.catalog.remove_unnamed(gone, self.pushes)
        await self.sweep()

    async def _check_changes(self) -> None:
        """Refuse to fold or remove what another server may be building on."""
        await self.fence.claim(await self.fence.newest())

    def _check_not_a_base(self, version: StoredVersion) -> None:
        base = version.record.version, version.record.content_digest
        for other in self.catalog.known.values():
            if (other.record.base_version, other.record.base_content_digest) == base:
                raise WeightSyncError(
                    Reason.VERSION_IN_USE,
                    f"version {base[0]} of {self._model} is the base of version "
                    f"{other.record.version} in the store; delete that one first",
                    metadata={"version": str(base[0])},
                )

    async def sweep(self) -> None:
        if clock.monotonic() - self._swept_at < _SWEEP_S:
            return
        self._swept_at = clock.monotonic()
        try:
            if await self.collects():
                await self.catalog.sweep(self._clock, self.pushes)
        except WeightSyncError as error:
            logger.warning(
                "objects that no version of %s needs could not be removed yet: %s",
                self._model,
                error,
            )

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


def _encoded(manifest: Manifest) -> tuple[str, bytes]:
    body = manifest.to_json()
    return xxhash.xxh3_128_hexdigest(body), body


def _unknown(model: str, version: int) -> WeightSyncError:
    return WeightSyncError(
        Reason.VERSION_UNKNOWN, f"version {version} of {model} is not in the store"
    )
