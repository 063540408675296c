"""The parts of one model, made and joined; what calls reach them through."""

from __future__ import annotations

import builtins
import contextlib
from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.accepted_tensors import AcceptedTensors
from weightsync_server.catalog.commits import CommitService
from weightsync_server.catalog.epochs import Epochs
from weightsync_server.catalog.feed import ChangeFeed
from weightsync_server.catalog.garbage_collector import GarbageCollector
from weightsync_server.catalog.layout_cache import KnownLayouts
from weightsync_server.catalog.pins import Pins
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.retention import Retention
from weightsync_server.catalog.serving import ServingState
from weightsync_server.catalog.table import VersionTable
from weightsync_server.deltas import ChainLimits, Compactor, Materializer
from weightsync_server.residency.adoption import CheckpointAdoption
from weightsync_server.residency.digests import digesting
from weightsync_server.residency.eviction import EvictionPolicy
from weightsync_server.residency.incoming import IncomingVersions
from weightsync_server.residency.orphans import OrphanReaper
from weightsync_server.residency.segments import SegmentAllocator
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.residency.stager import Stager
from weightsync_server.store.disk_quota import DiskQuota

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from contextlib import AbstractAsyncContextManager

    from weightsync.errors import WeightSyncError
    from weightsync.model.manifest import Layout, Manifest
    from weightsync.shm.segment_socket import OfferedFile, SegmentServer
    from weightsync_server.catalog.commits import CommittedDelta
    from weightsync_server.catalog.feed import VersionEvent
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.catalog.retention import Surplus
    from weightsync_server.residency.budget import SegmentBudget
    from weightsync_server.residency.digests import StagedDigests
    from weightsync_server.residency.leases import SlotLease
    from weightsync_server.store.protocol import Store
    from weightsync_server.store.store_records import CommitRecord
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["ModelVersions"]


class ModelVersions:
    """All versions of one model. A committed version never changes; numbers only rise.

    State changes on the event loop only. Call `open` before anything else. What is done is done by
    the parts; whoever needs one or two of them gets those.

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
        self.name = name
        self.store = store
        self.fetchers = fetchers
        self._catalog(retention or Retention(), disk_floor_bytes, reserved)
        self._residency(server, budget, slots, chains or ChainLimits())
        self._join()

    def _catalog(self, retention: Retention, disk_floor_bytes: int, reserved: int) -> None:
        """Make what knows which versions exist."""
        self.disk = DiskQuota(self.store, disk_floor_bytes)
        self._pins = Pins(self.name, self.store)
        self.table = VersionTable(self.name, self._pins, reserved)
        self.epochs = Epochs(self.name, self.store)
        self.serving = ServingState(self.table, self._pins)
        self.layouts = KnownLayouts()
        self.commits = CommitService(
            self.table, self.epochs, self._pins, self.store, self.layouts, self.disk
        )
        self._collector = GarbageCollector(
            self.table, self.serving, self.commits, retention, self.disk, self._surplus
        )
        self._feed = ChangeFeed()
        self.accepted = AcceptedTensors()

    def _residency(
        self, server: SegmentServer, budget: SegmentBudget, slots: int, chains: ChainLimits
    ) -> None:
        """Make what knows which versions lie in memory, and how they get there."""
        store, fetch, durable = self.store, self.fetchers, self.store.durable
        self.keeper = SegmentAllocator(budget, server, fetch)
        eviction = EvictionPolicy(
            self.table, self.serving, self.commits, self._collector, durable=durable
        )
        self.pool = SlotPool(slots, self.keeper, eviction.order, eviction.evict, durable=durable)
        self.orphans = OrphanReaper(
            self.table, self.serving, self.pool, self.commits, store, self._collector.spawn
        )
        self.builder = Materializer(store, self.pool, self.keeper, fetch)
        self.folder = Compactor(
            self.table,
            self.commits,
            self.pool,
            store,
            fetch,
            self.disk,
            chains,
            lock=self.builder.lock,
            collect=self._collector.collect,
        )
        self._stager = Stager(
            self.table,
            self.serving,
            self.commits,
            self.pool,
            self.keeper,
            store,
            fetch,
            check=self.builder.check,
            materialize=self.builder.build,
        )
        self._adoption = CheckpointAdoption(
            self.table, self.commits, self.pool, self._stager, self.orphans, store, fetch
        )
        self.arrivals = IncomingVersions(self.keeper)

    def _join(self) -> None:
        """Lead back up what parts tell those that are above them."""
        self.table.on_change.append(self._changed)
        self.table.on_free.append(self.pool.wake)
        self.serving.on_replaced = self.orphans.settle
        self.commits.on_commit = self._collector.collect
        self.pool.on_unleased = self.orphans.settle
        self.pool.on_wait = self.folder.stand_back

    def _changed(self, record: VersionRecord) -> None:
        gone = self.table.find(record.version) is not record
        self._feed.emit(record.to_info(), deleted=gone)

    def _surplus(self, surplus: Surplus, most_carried: int) -> None:
        self.folder.consider(surplus, most_carried)

    async def open(self, records: Iterable[CommitRecord]) -> None:
        """Take over what the store holds. Records of other models are passed over."""
        for commit in records:
            if commit.model == self.name:
                self.table.load(VersionRecord.committed(commit))
        loaded = self.table.list()
        await self.epochs.open(max((record.epoch for record in loaded), default=0))
        await self._pins.open()
        for record in loaded:
            base = record.commit.base_version if record.commit else 0
            record.base = self.table.find(base)
            self.serving.restore_marks(record)

    async def close(self) -> None:
        """End watches, finish deletions, give all memory back."""
        self._feed.close()
        await self._stager.close()
        await self.folder.close()
        await self._collector.close()
        self.pool.close()
        await self.keeper.close()

    # Which versions there are

    @property
    def newest(self) -> int:
        """Newest committed version; 0: none."""
        return self.table.newest

    @property
    def highest(self) -> int:
        """Highest number that was ever committed, deleted versions included."""
        return self.table.highest

    def find(self, version: int) -> VersionRecord | None:
        """Return a version, or None."""
        return self.table.find(version)

    def get(self, version: int) -> VersionRecord:
        """Return a version; see `VersionTable.get`."""
        return self.table.get(version)

    def list(self) -> builtins.list[VersionRecord]:
        """Return all versions, newest first."""
        return self.table.list()

    def newest_applicable(self) -> VersionRecord:
        """Return the newest version that may be applied; see `VersionTable.newest_applicable`."""
        return self.table.newest_applicable()

    def next_version(self) -> int:
        """Return the lowest number above all versions, those that are being pushed included."""
        return self.table.next_version()

    def brought_by(self, *, push_id: str = "", key: str = "") -> VersionRecord | None:
        """Return the newest committed version of a push, by its id or its key, or None."""
        return self.table.brought_by(push_id=push_id, key=key)

    def same_content(self, content_digest: str) -> VersionRecord | None:
        """Return the newest committed version with this content, or None."""
        return self.table.same_content(content_digest)

    def not_above(self, version: int) -> WeightSyncError:
        """Return the refusal of a number that is not above all that were used."""
        return self.table.not_above(version)

    def changed(self, record: VersionRecord) -> None:
        """Tell watchers, and those who wait for a slot."""
        self.table.touch(record)

    def watch(self) -> AsyncIterator[VersionEvent]:
        """Yield the present state of every version, oldest first, then each change."""
        return self._feed.watch(record.to_info() for record in reversed(self.list()))

    def end_watches(self) -> None:
        """End every watch after what it has queued; later ones end after the present state."""
        self._feed.close()

    def slots_status(self) -> builtins.list[pb.SlotStatus]:
        """Return what each slot holds."""
        return self.pool.status()

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

    # Coming in

    def unlisted(
        self, version: int, epoch: int = 0, metadata: dict[str, str] | None = None
    ) -> VersionRecord:
        """Return a record of a version that may turn out to be another one."""
        return VersionRecord(self.name, version, epoch, dict(metadata or {}))

    def enlist(self, record: VersionRecord) -> None:
        """Register a version whose bytes arrive."""
        self.table.add(record)

    async def drop(self, record: VersionRecord, *, keep: bool = False) -> None:
        """Forget a version that was not committed; see `OrphanReaper.drop`."""
        await self.orphans.drop(record, keep=keep)

    async def seal(self, layout: Layout, digests: Iterable[bytes]) -> Manifest:
        """Return a manifest with its digests computed; see `CommitService.seal`."""
        return await self.commits.seal(layout, digests)

    async def commit(
        self,
        record: VersionRecord,
        manifest: Manifest,
        *,
        trainer_verified: bool = False,
        delta: CommittedDelta | None = None,
    ) -> CommitRecord:
        """Make a version exist, once and for ever; see `CommitService.commit`."""
        return await self.commits.commit(
            record, manifest, trainer_verified=trainer_verified, delta=delta
        )

    def staged(self, record: VersionRecord, manifest: Manifest) -> None:
        """Take note that all bytes lie in the version's slot, verified."""
        self.table.staged(record, manifest)

    def hand_over(self, record: VersionRecord, known: VersionRecord, manifest: Manifest) -> None:
        """Give the slot of a record to the version that it repeats; see `Stager.hand_over`."""
        self._stager.hand_over(record, known, manifest)

    async def layout(self, digest: str) -> KnownLayout | None:
        """Return a layout that an earlier version had, or None."""
        return await self.commits.layout(digest)

    async def manifest(self, record: VersionRecord) -> Manifest:
        """Return the manifest of a committed version, from memory or the store."""
        return await self.commits.manifest(record)

    async def adopt(self, files: Sequence[OfferedFile], version: int) -> VersionRecord:
        """Commit the engine's checkpoint, or find it; see `CheckpointAdoption.adopt`."""
        return await self._adoption.adopt(files, version)

    def borrow_checkpoint(
        self, files: Sequence[OfferedFile]
    ) -> AbstractAsyncContextManager[SlotLease]:
        """Lend the engine's checkpoint to the engine; see `CheckpointAdoption.borrow`."""
        return self._adoption.borrow(files)

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

    @contextlib.asynccontextmanager
    async def digesting(self, lease: SlotLease) -> AsyncIterator[StagedDigests]:
        """Give digests for `verify_staged`; nobody is at them when the body has ended."""
        manifest = await self.manifest(lease.record)
        async with digesting(lease, manifest, self.fetchers) as digests:
            yield digests

    async def verify_staged(self, lease: SlotLease, digests: StagedDigests | None = None) -> None:
        """Prove again that the segments hold the version; see `Stager.verify`."""
        await self._stager.verify(lease, digests)

    def let_go(self, ids: Iterable[str]) -> None:
        """Take note that no process of the engine maps these segments any more."""
        self.keeper.release(ids)

    # What is live, and what may be

    @property
    def live(self) -> int:
        """The version that every rank serves; 0: none does."""
        return self.serving.live

    @property
    def rollback_to(self) -> int:
        """The version that was live before and is still good; 0: none."""
        return self.serving.rollback_to

    def set_live(self, version: int) -> None:
        """Take note that every rank serves a version; 0: none does."""
        self.serving.set_live(version)

    async def taken(self, record: VersionRecord) -> None:
        """Take note that every rank of the engine takes a version's tensors."""
        layout = (await self.manifest(record)).layout
        await self.accepted.learn(layout)
        for other in self.list():
            same = other.commit is not None and other.commit.layout_digest == layout.digest
            if (same or other is record) and other.layout_check != pb.LAYOUT_CHECK_PASSED:
                other.layout_check = pb.LAYOUT_CHECK_PASSED
                self.table.publish(other)

    def set_live_check(self, version: int, check: pb.LiveCheck.ValueType) -> None:
        """Take note of whether the live parameters of a version were compared as a whole."""
        self.serving.set_live_check(version, check)

    def restore_history(self, *versions: int) -> None:
        """Take over which versions were live, oldest first, as the journal says."""
        self.serving.restore_history(versions)

    async def set_rejected(self, version: int, reason: str) -> None:
        """Make "newest" skip a version's content until `clear_rejected`; persisted."""
        await self.serving.reject(version, reason)

    async def clear_rejected(self, version: int) -> None:
        """Make "newest" accept a version's content again, whatever its numbers; persisted."""
        await self.serving.accept(version)

    async def pin(self, version: int, pinned: bool) -> VersionRecord:  # noqa: FBT001 - as on the wire
        """Keep a version from being collected and evicted, or let it go; persisted."""
        return await self.serving.pin(version, pinned=pinned)

    def collect(self) -> None:
        """Begin to delete what exceeds the retention, and to fold what keeps too much."""
        self._collector.collect()

    async def delete(self, version: int, *, force: bool = False) -> None:
        """Delete a committed version, by force also the way back; see `GarbageCollector.delete`."""
        await self._collector.delete(version, force=force)
