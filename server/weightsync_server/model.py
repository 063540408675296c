"""The registry of one model: which versions exist, who may write, what is live."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.accepted_tensors import AcceptedTensors
from weightsync_server.catalog.epochs import Epochs
from weightsync_server.catalog.feed import ChangeFeed
from weightsync_server.catalog.garbage_collector import GarbageCollector
from weightsync_server.catalog.layout_cache import LayoutCache
from weightsync_server.catalog.pins import Pins
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.retention import Retention
from weightsync_server.catalog.serving import ServingHistory
from weightsync_server.catalog.table import VersionTable
from weightsync_server.deltas import ChainLimits, Compactor, Materializer
from weightsync_server.ops.tasks import to_end
from weightsync_server.residency.adoption import adopt, borrow
from weightsync_server.residency.incoming import IncomingVersions
from weightsync_server.residency.orphans import OrphanReaper
from weightsync_server.residency.segments import SegmentAllocator
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.residency.stager import Stager
from weightsync_server.store.disk_quota import DiskQuota
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from weightsync.model.manifest import Layout
    from weightsync.shm.segment_socket import OfferedFile, SegmentServer
    from weightsync_server.catalog.feed import VersionEvent
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.deltas import PushedDelta
    from weightsync_server.residency.budget import SegmentBudget
    from weightsync_server.residency.digests import ShardDigests
    from weightsync_server.residency.leases import SlotLease
    from weightsync_server.store.protocol import Store
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["ModelVersions"]


class ModelVersions(VersionTable):
    """All versions of one model. A committed version never changes; numbers only rise.

    State changes on the event loop only. Call `open` before anything else.

    Args:
        name: Model name.
        store: Where committed versions are kept; opened by the caller.
        fetchers: Do all work on bytes.
        server: The segment socket.
        budget: Shared memory of all models.
        slots: Versions held in memory at once.
        retention: Bounds on what the store keeps.
        chains: Bounds on deltas in a row.
        disk_floor_bytes: Free space of the store that no push may use.
        reserved: Number kept for the engine's checkpoint: pushes that begin before it is adopted
            get higher ones. 0: none.
    """

    def __init__(
        self,
        name: str,
        *,
        store: Store,
        fetchers: FetchApi,
        server: SegmentServer,
        budget: SegmentBudget,
        slots: int = 2,
        retention: Retention | None = None,
        chains: ChainLimits | None = None,
        disk_floor_bytes: int = 0,
        reserved: int = 0,
    ) -> None:
        super().__init__(name, Pins(name, store), reserved)
        self.store = store
        self.disk = DiskQuota(store, disk_floor_bytes)
        self.fetchers = fetchers
        self.live = 0
        self.epochs = Epochs(name, store)
        self.keeper = SegmentAllocator(budget, server, fetchers)
        self._collector = GarbageCollector(self, retention or Retention())
        self.orphans = OrphanReaper(self, self._collector.spawn)
        self.builder = Materializer(self)
        self.folder = Compactor(self, chains or ChainLimits())
        self.pool = SlotPool(
            slots,
            self.keeper,
            self._collector.order,
            self._collector.evict,
            durable=store.durable,
        )
        self.pool.on_wait = self.folder.stand_back
        self.layouts = LayoutCache()
        self._feed = ChangeFeed()
        self._history = ServingHistory()
        self._stager = Stager(self)
        self.arrivals = IncomingVersions(self.keeper)
        self.accepted = AcceptedTensors()

    async def open(self, records: Iterable[CommitRecord]) -> None:
        """Take over what the store holds. Records of other models are passed over."""
        for commit in records:
            if commit.model == self.name:
                self._records[commit.version] = VersionRecord.committed(commit)
        await self.epochs.open(max((r.epoch for r in self._records.values()), default=0))
        await self._marks.open()
        for record in self._records.values():
            record.base = self._records.get(record.commit.base_version) if record.commit else None
            record.pinned = record.version in self._marks.pinned
            record.rejected_reason = self._marks.rejected.get(record.version, "")
            self._settle_serving(record)

    async def close(self) -> None:
        """End watches, finish deletions, give all memory back."""
        self._feed.close()
        await self._stager.close()
        await self.folder.close()
        await self._collector.close()
        self.pool.close()
        await self.keeper.close()

    # Writers

    @property
    def epoch(self) -> int:
        """Newest epoch; 0: nobody has asked for one."""
        return self.epochs.newest

    async def acquire_epoch(self, holder: str) -> int:
        """Make the caller the writer; older writers can commit nothing when this returns."""
        return await self.epochs.acquire(holder)

    def check_epoch(self, epoch: int) -> int:
        """Return the epoch to bind to; 0 stands for the newest.

        Raises:
            WeightSyncError: EPOCH_STALE.
        """
        return self.epochs.check(epoch)

    @property
    def rollback_to(self) -> int:
        """The version that was live before and is still good; 0: none."""

        def good(version: int) -> bool:
            record = self.find(version)
            return bool(record and record.commit and not record.rejected_reason)

        return self._history.before(self.live, good)

    def watch(self) -> AsyncIterator[VersionEvent]:
        """Yield the present state of every version, oldest first, then each change."""
        return self._feed.watch(record.to_info() for record in reversed(self.list()))

    def end_watches(self) -> None:
        """End every watch after what it has queued; later ones end after the present state."""
        self._feed.close()

    def slots_status(self) -> builtins.list[pb.SlotStatus]:
        """Return what each slot holds."""
        return self.pool.status()

    # Coming in

    def unlisted(
        self, version: int, epoch: int = 0, metadata: dict[str, str] | None = None
    ) -> VersionRecord:
        """Return a record of a version that may turn out to be another one."""
        return VersionRecord(self.name, version, epoch, dict(metadata or {}))

    def enlist(self, record: VersionRecord) -> None:
        """Register a version whose bytes arrive."""
        self._records[record.version] = record
        self.changed(record)

    async def drop(self, record: VersionRecord, *, keep: bool = False) -> None:
        """Forget a version that was not committed, its slot and what was stored of it.

        Nothing may write to its segments any more. While it is live or leased it stays, failed.

        Args:
            record: The version.
            keep: What was stored stays, for the next life of the server.
        """
        await self.orphans.drop(record, keep=keep)

    async def seal(self, layout: Layout, digests: Iterable[bytes]) -> Manifest:
        """Return a manifest with its digests computed, off the event loop, and a shared layout."""
        if "digest" not in vars(layout):
            await asyncio.to_thread(getattr, layout, "digest")
        manifest = Manifest(self.layouts.remember(layout).layout, tuple(digests))
        await asyncio.to_thread(getattr, manifest, "manifest_digest")
        return manifest

    async def commit(
        self,
        record: VersionRecord,
        manifest: Manifest,
        *,
        trainer_verified: bool = False,
        adopted: bool = False,
        delta: PushedDelta | None = None,
    ) -> CommitRecord:
        """Make a version exist, once and for ever; every shard is verified and durable.

        Args:
            record: From `receive`; its slot holds the bytes.
            manifest: From `seal`.
            trainer_verified: The trainer's own digests were compared.
            adopted: It is the engine's checkpoint, which no writer's epoch guards.
            delta: What was pushed of it, from `folder.admit`; None: all.

        Raises:
            WeightSyncError: EPOCH_STALE, VERSION_NOT_ABOVE or what the store says; nothing changed.
        """
        async with self.epochs.lock:
            if not adopted and record.epoch != self.epoch:
                raise self.epochs.stale(record.epoch)
            if record.version <= self.highest and not adopted:
                raise self.not_above(record.version)
            if record.durability == pb.DURABILITY_FAILED:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT, "the bytes changed in shared memory; push them again"
                )
            told = {"trainer_verified": trainer_verified, "adopted": adopted}
            commit = record.sealed(manifest, **told, delta=delta.facts if delta else None)
            kept = delta if delta and delta.kept else None
            await failpoints.reach("commit.store")
            await self.store.commit(commit, manifest, kept.manifest if kept else None)
            record.commit, record.base = commit, kept.base if kept else None
            record.durability = pb.DURABILITY_COMMITTED
            record.missing = None
            self.staged(record, manifest)
        self.collect()
        return commit

    def collect(self) -> None:
        """Begin to delete what exceeds the retention, and to fold what keeps too much."""
        self._collector.collect()

    def staged(self, record: VersionRecord, manifest: Manifest) -> None:
        """Take note that all bytes lie in the version's slot, verified."""
        record.manifest = manifest
        record.residency = pb.RESIDENCY_STAGED
        record.place.settle()
        self.changed(record)

    def hand_over(self, record: VersionRecord, known: VersionRecord, manifest: Manifest) -> None:
        """Give the slot of a record to the version that it repeats, or free it.

        Args:
            record: Whose slot holds the bytes, verified.
            known: The committed version that these bytes turned out to be.
            manifest: Of the bytes.
        """
        self._stager.hand_over(record, known, manifest)

    async def layout(self, digest: str) -> KnownLayout | None:
        """Return a layout that an earlier version had, or None."""
        if self.layouts.get(digest) is None:
            same = (r for r in self.list() if r.commit and r.commit.layout_digest == digest)
            if (record := next(same, None)) is not None:
                await self.manifest(record)
        return self.layouts.get(digest)

    async def manifest(self, record: VersionRecord) -> Manifest:
        """Return the manifest of a committed version, from memory or the store."""
        if record.manifest is not None:
            return record.manifest
        manifest = await self.store.manifest(self.name, record.version)
        return await self.seal(manifest.layout, manifest.digests)

    async def adopt(self, files: Sequence[OfferedFile], version: int) -> VersionRecord:
        """Commit the engine's checkpoint as a version, or find the version that it is.

        Args:
            files: Name, size and read-only descriptor of each safetensors file; the caller closes.
            version: Its number if it is new; 0: the next.

        Raises:
            WeightSyncError: LAYOUT_INVALID, SHARD_INVALID, NO_SLOT, VERSION_NOT_ABOVE, ...
        """
        return await adopt(self, files, version)

    def borrow_checkpoint(
        self, files: Sequence[OfferedFile]
    ) -> AbstractAsyncContextManager[SlotLease]:
        """Lend the engine's checkpoint to the engine, in memory that is given back after the block.

        It makes no version, and none that exists loses its bytes for good.

        Args:
            files: As for `adopt`; the caller closes.

        Raises:
            WeightSyncError: LAYOUT_INVALID, SHARD_INVALID, MEMORY_EXHAUSTED, ...
        """
        return borrow(self, self._stager, files)

    # Going out

    async def stage(
        self, version: int, timeout_s: float, *, for_engine: bool = True, durable: bool = True
    ) -> SlotLease:
        """Return a lease on a version whose bytes lie in a slot, read from the store if need be.

        Args:
            version: A committed version, or the live one.
            timeout_s: Longest time to wait, in seconds.
            for_engine: An engine will map the segments, so they count until `let_go`.
            durable: False: a version that is staged will do before it is committed.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, PUSH_INCOMPLETE, NO_SLOT, DATA_CORRUPT,
                DEADLINE_EXCEEDED, MEMORY_EXHAUSTED.
        """
        record = self.get(version)
        return await self._stager.stage(record, timeout_s, for_engine=for_engine, durable=durable)

    async def verify_staged(self, lease: SlotLease, digests: ShardDigests | None = None) -> None:
        """Prove again that the segments hold the version.

        Args:
            lease: On the version.
            digests: Of its segments, as far as they were begun; None: begin now.

        Raises:
            WeightSyncError: DATA_CORRUPT, naming the tensor; the next `stage` reads the store.
        """
        await self._stager.verify(lease, digests)

    def let_go(self, ids: Iterable[str]) -> None:
        """Take note that no process of the engine maps these segments any more."""
        self.keeper.let_go(ids)

    def set_live(self, version: int) -> None:
        """Take note that every rank serves a version; 0: none does."""
        before = self._records.get(self.live)
        if version and version != self.live:
            self._history.add(version)
        self.live = version
        for record in (before, self._records.get(version)):
            if record is not None:
                record.served = record.served or record.version == version
                self._settle_serving(record)
        if before is not None:
            self.orphans.settle(before)
        self.pool.wake()

    async def taken(self, record: VersionRecord) -> None:
        """Take note that every rank of the engine takes a version's tensors."""
        layout = (await self.manifest(record)).layout
        await self.accepted.learn(layout)
        for other in self.list():
            same = other.commit is not None and other.commit.layout_digest == layout.digest
            if (same or other is record) and other.layout_check != pb.LAYOUT_CHECK_PASSED:
                other.layout_check = pb.LAYOUT_CHECK_PASSED
                self.tell(other)

    def set_live_check(self, version: int, check: pb.LiveCheck.ValueType) -> None:
        """Take note of whether the live parameters of a version were compared as a whole."""
        if (record := self._records.get(version)) is not None:
            record.check(check)
            self.tell(record)

    def restore_history(self, *versions: int) -> None:
        """Take over which versions were live, oldest first, as the journal tells."""
        self._history.restore([version for version in versions if version in self._records])

    async def set_rejected(self, version: int, reason: str) -> None:
        """Make "newest" skip a version's content until `clear_rejected`; persisted."""
        await self._mark(version, rejected=reason or "no reason given")

    async def clear_rejected(self, version: int) -> None:
        """Make "newest" accept a version's content again, whatever its numbers; persisted."""
        content = self.get(version).content_digest
        for record in self.list():
            if record.version == version or (content and record.content_digest == content):
                await self._mark(record.version, rejected="")

    async def unmark(self, version: int) -> None:
        """Forget what people decided about a version that was never committed nor served."""
        await self._marks.change(version, pinned=False, rejected="")

    async def pin(self, version: int, pinned: bool) -> VersionRecord:  # noqa: FBT001 - as on the wire
        """Keep a version from being collected and evicted, or let it go; persisted."""
        return await self._mark(version, pinned=pinned)

    async def delete(self, version: int, *, force: bool = False) -> None:
        """Delete a committed version, by force also the way back; its number is never used again.

        Raises:
            WeightSyncError: VERSION_UNKNOWN, VERSION_IN_USE.
        """
        await self.erase(self._collector.deletable(self.get(version), force=force))

    async def erase(self, record: VersionRecord) -> None:
        """Delete a committed version that nobody uses; no check is made.

        Raises:
            WeightSyncError: What the store says; the version is there as before, or gone.
        """
        # Gone for everybody before the first await, so that nothing can begin to use it.
        self.forget(record)
        self.pool.release(record)
        # Wholly, also when the caller leaves: half of it would come back after a restart.
        erasing = asyncio.create_task(self._erased(record))
        self.disk.frees(erasing)
        await to_end(erasing)

    async def _erased(self, record: VersionRecord) -> None:
        try:
            await self.scrub(record)
        except WeightSyncError:
            await self._put_back(record)
            raise

    def forget(self, record: VersionRecord) -> None:
        """Take a version out of the registry at once; `scrub` must follow."""
        if record.commit is not None or record.served:
            # Nor does anybody get its number, while that is being written down.
            self._spent = max(self._spent, record.version)
        del self._records[record.version]
        record.residency = pb.RESIDENCY_ABSENT
        self._feed.emit(record.to_info(), deleted=True)

    async def scrub(self, record: VersionRecord) -> None:
        """Remove what the store holds of a version, for ever."""
        await self._marks.use(record.version)
        await self.store.delete(self.name, record.version)
        # A mark of a version that is gone harms nobody.
        with contextlib.suppress(WeightSyncError):
            await self._marks.change(record.version, pinned=False, rejected="")

    def changed(self, record: VersionRecord) -> None:
        """Tell watchers, and those who wait for a slot."""
        self.tell(record)
        self.pool.wake()

    def tell(self, record: VersionRecord) -> None:
        """Tell watchers of a version, unless they were told already that it is gone."""
        if self.find(record.version) is record:
            self._feed.emit(record.to_info())

    # Inside

    async def _put_back(self, record: VersionRecord) -> None:
        """Register a version again whose deletion failed, unless its record is gone already."""
        try:
            await self.store.manifest(self.name, record.version)
        except WeightSyncError as error:
            if error.reason is Reason.VERSION_UNKNOWN:
                return
        self._records[record.version] = record
        self.changed(record)

    async def _mark(
        self, version: int, *, pinned: bool | None = None, rejected: str | None = None
    ) -> VersionRecord:
        record = self.get(version)
        await self._marks.change(version, pinned=pinned, rejected=rejected)
        record.pinned = version in self._marks.pinned
        record.rejected_reason = self._marks.rejected.get(version, "")
        self._settle_serving(record)
        return record

    def _settle_serving(self, record: VersionRecord) -> None:
        if record.version == self.live:
            record.serving = pb.SERVING_LIVE
        else:
            record.serving = pb.SERVING_REJECTED if record.rejected_reason else pb.SERVING_NO
        self.changed(record)
