"""The parts of one model, made, joined and opened together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from weightsync_server.catalog.accepted_tensors import AcceptedTensors
from weightsync_server.catalog.client_runs import ClientRuns
from weightsync_server.catalog.commits import CommitService
from weightsync_server.catalog.engine_layouts import EngineLayouts
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
from weightsync_server.residency.eviction import EvictionPolicy
from weightsync_server.residency.incoming import IncomingVersions
from weightsync_server.residency.orphans import OrphanReaper
from weightsync_server.residency.segments import SegmentAllocator
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.residency.stager import Stager
from weightsync_server.store.disk_quota import DiskQuota

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync_server.store.protocol import Store
    from weightsync_server.store.store_records import CommitRecord
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["Model", "ModelLimits", "open_model"]


@dataclass(frozen=True)
class ModelLimits:
    """Bounds on one model.

    Attributes:
        slots: Versions held in memory at once.
        retention: Bounds on what the store keeps.
        chains: Bounds on deltas in a row.
        disk_floor_bytes: Free space of the store that no push may use.
        reserved_version: Number kept for the engine's checkpoint: pushes that begin before it is
            adopted get higher ones. 0: none.
    """

    slots: int = 2
    retention: Retention = field(default_factory=Retention)
    chains: ChainLimits = field(default_factory=ChainLimits)
    disk_floor_bytes: int = 0
    reserved_version: int = 0


@dataclass(frozen=True, eq=False)
class Model:
    """All of one model. A committed version never changes; numbers only rise.

    State changes on the event loop only. Whoever needs one or two of the parts gets those.

    Attributes:
        store: Where committed versions are kept.
        fetch: Does all work on bytes.
        disk: Promises room in the store.
        table: Which versions exist.
        epochs: Who may write them.
        runs: Which runs of clients they came from.
        pins: What people decided about them, and which numbers were used.
        serving: Which of them is live, and which may be.
        commits: Makes them exist, and erases them.
        layouts: Layouts that they share.
        collector: Deletes them.
        feed: Tells watchers of their changes.
        accepted: Which tensors the engine takes.
        engine_layouts: What the engines hold.
        segments: Owns their memory.
        slots: Who has it.
        orphans: Drops those that are not committed.
        materializer: Makes them in slots.
        compactor: Keeps their chains short.
        stager: Gives leases on them.
        adoption: Makes one of the engine's checkpoint.
        incoming: Announces those that still come in.
    """

    store: Store
    fetch: FetchApi
    disk: DiskQuota
    table: VersionTable
    epochs: Epochs
    runs: ClientRuns
    pins: Pins
    serving: ServingState
    commits: CommitService
    layouts: KnownLayouts
    collector: GarbageCollector
    feed: ChangeFeed
    accepted: AcceptedTensors
    engine_layouts: EngineLayouts
    segments: SegmentAllocator
    slots: SlotPool
    orphans: OrphanReaper
    materializer: Materializer
    compactor: Compactor
    stager: Stager
    adoption: CheckpointAdoption
    incoming: IncomingVersions

    async def close(self) -> None:
        """End watches, finish deletions, give all memory back."""
        self.feed.close()
        await self.stager.close()
        await self.compactor.close()
        await self.collector.close()
        self.slots.close()
        await self.segments.close()


async def open_model(
    name: str,
    store: Store,
    fetch: FetchApi,
    segments: SegmentAllocator,
    limits: ModelLimits,
    records: Iterable[CommitRecord],
) -> Model:
    """Return a model with what the store holds of it.

    Args:
        name: Of the model.
        store: Opened by the caller.
        fetch: Does all work on bytes.
        segments: Makes the memory of its versions; closed with the model.
        limits: Bounds on it.
        records: What the store holds. Those of other models are passed over.
    """
    model = _assembled(name, store, fetch, segments, limits)
    _join(model)
    await _load(model, records)
    return model


def _assembled(
    name: str, store: Store, fetch: FetchApi, segments: SegmentAllocator, limits: ModelLimits
) -> Model:
    durable = store.durable
    disk = DiskQuota(store, limits.disk_floor_bytes)
    pins, epochs, layouts = Pins(name, store), Epochs(name, store), KnownLayouts()
    table = VersionTable(name, pins, limits.reserved_version)
    serving = ServingState(table, pins)
    commits = CommitService(table, epochs, pins, store, layouts, disk)
    collector = GarbageCollector(table, serving, commits, limits.retention, disk)
    eviction = EvictionPolicy(table, serving, commits, collector, durable=durable)
    slots = SlotPool(limits.slots, segments, eviction.order, eviction.evict, durable=durable)
    orphans = OrphanReaper(table, serving, slots, commits, store, collector.spawn)
    materializer = Materializer(store, slots, segments, fetch)
    compactor = Compactor(
        table,
        commits,
        slots,
        store,
        fetch,
        disk,
        limits.chains,
        lock=materializer.lock,
        collect=collector.collect,
    )
    stager = Stager(
        table,
        serving,
        commits,
        slots,
        segments,
        store,
        fetch,
        check=materializer.check,
        materialize=materializer.build,
    )
    return Model(
        store=store,
        fetch=fetch,
        disk=disk,
        table=table,
        epochs=epochs,
        runs=ClientRuns(table, epochs),
        pins=pins,
        serving=serving,
        commits=commits,
        layouts=layouts,
        collector=collector,
        feed=ChangeFeed(table),
        accepted=AcceptedTensors(table, commits),
        engine_layouts=EngineLayouts(),
        segments=segments,
        slots=slots,
        orphans=orphans,
        materializer=materializer,
        compactor=compactor,
        stager=stager,
        adoption=CheckpointAdoption(table, commits, slots, stager, orphans, store, fetch),
        incoming=IncomingVersions(segments),
    )


def _join(model: Model) -> None:
    """Lead back up what parts tell those that are above them."""
    model.table.on_free.append(model.slots.wake)
    model.serving.on_replaced = model.orphans.settle
    model.commits.on_commit = model.collector.collect
    model.collector.on_surplus = model.compactor.consider
    model.slots.on_unleased = model.orphans.settle
    model.slots.on_wait = model.compactor.stand_back
    model.epochs.catch_up = partial(_catch_up, model)


async def _catch_up(model: Model) -> None:
    """Take up what other servers have committed to the same store."""
    table = model.table
    for commit in await model.store.committed_elsewhere(table.name):
        if table.find(commit.version) is None:
            record = VersionRecord.committed(commit)
            record.base = table.find(commit.base_version)
            table.add(record)
    if not model.store.local:
        await model.serving.read_marks()


async def _load(model: Model, records: Iterable[CommitRecord]) -> None:
    table = model.table
    for commit in records:
        if commit.model == table.name:
            table.load(VersionRecord.committed(commit))
    loaded = table.list()
    await model.epochs.open(max((record.epoch for record in loaded), default=0))
    await model.pins.open()
    for record in loaded:
        base = record.commit.base_version if record.commit else 0
        record.base = table.find(base)
        model.serving.restore_marks(record)
