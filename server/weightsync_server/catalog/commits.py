"""Sealing, committing and erasing versions: each one transaction of store and table."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Layout, Manifest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.epochs import Epochs
from weightsync_server.catalog.pins import Pins
from weightsync_server.catalog.version_events import VersionCommitted
from weightsync_server.ops.tasks import to_end
from weightsync_server.store.store_records import DeltaFacts

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.ops.metrics import DeltaCounts
    from weightsync_server.store.disk_quota import DiskQuota
    from weightsync_server.store.protocol import Store
    from weightsync_server.store.store_records import CommitRecord


@dataclass(frozen=True)
class CommittedDelta:
    """A version as the change of `base`; `manifest` is that of the delta's own shards.

    `changed` counts the elements that the delta told; of a tensor that came densely, all. If
    `kept`, the store keeps the delta; else the whole version, or nothing.
    """

    base: VersionRecord
    manifest: Manifest
    changed: int
    counts: DeltaCounts
    kept: bool

    @property
    def facts(self) -> DeltaFacts:
        """What the commit record says of it."""
        base, counts = self.base, self.counts
        if not self.kept or base.commit is None:
            return DeltaFacts(self.changed, counts.fraction)
        digest = base.commit.content_digest
        return DeltaFacts(self.changed, counts.fraction, base.version, digest, counts.delta_bytes)


class CommitService:
    """Makes versions exist, and erases them, never by half; publishes `VersionCommitted`."""

    def __init__(
        self,
        table: VersionTable,
        epochs: Epochs,
        pins: Pins,
        store: Store,
        layouts: KnownLayouts,
        disk: DiskQuota,
    ) -> None:
        self._table = table
        self._epochs = epochs
        self._pins = pins
        self._store = store
        self._layouts = layouts
        self._disk = disk

    @property
    def epoch(self) -> int:
        """The epoch in which whoever asks for none writes."""
        return self._epochs.newest

    async def seal(self, layout: Layout, digests: Iterable[bytes]) -> Manifest:
        """Return a manifest with its digests computed, off the event loop, and a shared layout."""
        if "digest" not in vars(layout):
            await asyncio.to_thread(getattr, layout, "digest")
        manifest = Manifest(self._layouts.remember(layout).layout, tuple(digests))
        await asyncio.to_thread(getattr, manifest, "manifest_digest")
        return manifest

    async def layout(self, digest: str) -> KnownLayout | None:
        if self._layouts.get(digest) is None:
            same = (r for r in self._table.list() if r.commit and r.commit.layout_digest == digest)
            if (record := next(same, None)) is not None:
                await self.manifest(record)
        return self._layouts.get(digest)

    async def manifest(self, record: VersionRecord) -> Manifest:
        if record.manifest is not None:
            return record.manifest
        manifest = await self._store.manifest(record.model, record.version)
        return await self.seal(manifest.layout, manifest.digests)

    async def commit(
        self,
        record: VersionRecord,
        manifest: Manifest,
        *,
        trainer_verified: bool = False,
        adopted: bool = False,
        delta: CommittedDelta | None = None,
        probes: str = "",
    ) -> CommitRecord:
        """Make a version exist, once and for ever; every shard is verified and durable.

        The slot of `record` holds the bytes, and `manifest` comes from `seal`. `trainer_verified`:
        the trainer's own digests were compared. `adopted`: it is the engine's checkpoint, which no
        writer's epoch guards. Without a `delta`, all was pushed. `probes` are kept with it, as
        `kept_probes` packs them. If it raises EPOCH_STALE, VERSION_NOT_ABOVE or an error of the
        store, nothing changed.
        """
        async with self._epochs.lock:
            self._admit(record, adopted=adopted)
            commit = record.sealed(
                manifest,
                trainer_verified=trainer_verified,
                adopted=adopted,
                delta=delta.facts if delta else None,
                probes=probes,
            )
            kept = delta if delta and delta.kept else None
            await failpoints.reach("commit.store")
            try:
                await self._store.commit(commit, manifest, kept.manifest if kept else None)
            except WeightSyncError as error:
                self._epochs.doubt(error)
                raise
            record.become_committed(commit, kept.base if kept else None)
            self._table.staged(record, manifest)
        self._table.events.publish(VersionCommitted(record))
        return commit

    def _admit(self, record: VersionRecord, *, adopted: bool) -> None:
        if not adopted and record.epoch != self._epochs.newest:
            raise self._epochs.stale(record.epoch)
        numbered = adopted or record.backfill or record.in_place
        if record.version <= self._table.highest and not numbered:
            raise self._table.not_above(record.version)
        if record.durability == pb.DURABILITY_FAILED:
            raise WeightSyncError(
                Reason.DATA_CORRUPT, "the bytes changed in shared memory; push them again"
            )

    async def erase(self, record: VersionRecord) -> None:
        """Delete a committed version that nobody uses; no check is made.

        If the store refuses, it is there as before, or gone.
        """
        # Gone for everybody before the first await, so that nothing can begin to use it.
        self._table.remove(record)
        if record.slot is not None:
            record.slot.empty()
            self._table.wake()
        # Wholly, also when the caller leaves: half of it would come back after a restart.
        erasing = asyncio.create_task(self._erased(record))
        self._disk.frees(erasing)
        await to_end(erasing)

    async def catch_up(self) -> None:
        """Take up what other servers have committed to the same store."""
        if not self._store.local:
            async with self._epochs.lock:
                await self._epochs.catch_up()

    async def collects(self) -> bool:
        return await self._store.collects(self._table.name)

    async def scrub(self, record: VersionRecord) -> None:
        if not record.local:
            await self._pins.use(record.version)
        await self._store.delete(record.model, record.version)
        # A mark of a version that is gone harms nobody.
        with contextlib.suppress(WeightSyncError):
            await self.unmark(record)

    async def unmark(self, record: VersionRecord) -> None:
        await self._pins.change(record.version, pinned=False, rejected="", on_hold="")

    async def _erased(self, record: VersionRecord) -> None:
        try:
            await self.scrub(record)
        except WeightSyncError:
            await self._put_back(record)
            raise

    async def _put_back(self, record: VersionRecord) -> None:
        """Register a version again whose deletion failed, unless its record is gone already."""
        try:
            await self._store.manifest(record.model, record.version)
        except WeightSyncError as error:
            if error.reason is Reason.VERSION_UNKNOWN:
                return
        self._table.add(record)


_KEPT = 4


@dataclass(eq=False)
class KnownLayout:
    """A checked layout, which all versions that have it share.

    `headers` has, by shard index, the digest of the checked header bytes.
    """

    layout: Layout
    headers: dict[int, bytes] = field(default_factory=dict)


class KnownLayouts:
    def __init__(self) -> None:
        self._known: OrderedDict[str, KnownLayout] = OrderedDict()

    def get(self, digest: str) -> KnownLayout | None:
        return self._known.get(digest)

    def remember(self, layout: Layout) -> KnownLayout:
        """Return the remembered equal of `layout`. Its digest should have been computed before."""
        known = self._known.setdefault(layout.digest, KnownLayout(layout))
        self._known.move_to_end(layout.digest)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return known
