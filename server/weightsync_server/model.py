"""The parts of one model, made, joined and opened together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from weightsync_server.catalog.commits import CommitService, KnownLayouts
from weightsync_server.catalog.engine_layouts import EngineLayouts
from weightsync_server.catalog.epochs import ClientRuns, Epochs
from weightsync_server.catalog.feed import ChangeFeed
from weightsync_server.catalog.garbage_collector import (
    GarbageCollector,
    Retention,
    SurplusFound,
    nothing,
)
from weightsync_server.catalog.layout_compatibility import LayoutCompatibility
from weightsync_server.catalog.pins import Pins
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.serving import ServingState
from weightsync_server.catalog.table import VersionTable
from weightsync_server.catalog.version_events import (
    EventBus,
    LeaseEnded,
    LiveReplaced,
    SlotFreed,
    SlotWanted,
    VersionCommitted,
)
from weightsync_server.deltas import ChainSettings, Compactor, Materializer
from weightsync_server.ops.settings_group import setting
from weightsync_server.residency.adoption import CheckpointAdoption, OriginNumbers
from weightsync_server.residency.orphans import OrphanReaper
from weightsync_server.residency.segment_allocator import SegmentAllocator
from weightsync_server.residency.slot_pool import SlotPool
from weightsync_server.residency.stager import Stager
from weightsync_server.store.disk_quota import DiskQuota
from weightsync_server.store.protocol import Store
from weightsync_server.store.store_records import CommitRecord
from weightsync_server.workers.fetch.fetch_api import FetchApi


@dataclass(frozen=True)
class ModelSettings:
    """Settings of one model.

    The engine's checkpoint is the `reserved_version`: pushes that begin before it is adopted get
    higher numbers; 0: none is reserved.
    """

    slots: int = setting(2, "Versions held in memory. With 3, rollback is instant.", ge=2, le=16)
    retention: Retention = field(default_factory=Retention)
    chains: ChainSettings = field(default_factory=ChainSettings)
    disk_floor_bytes: int = setting(
        256 << 20, "Free space on the store's disk that pushes leave for journal and records.", ge=0
    )
    reserved_version: int = 1


@dataclass(frozen=True, eq=False)
class Model:
    """All of one model. A committed version never changes; numbers only rise.

    State changes on the event loop only. Whoever needs one or two of the parts gets those.
    """

    store: Store
    events: EventBus
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
    accepted: LayoutCompatibility
    engine_layouts: EngineLayouts
    segments: SegmentAllocator
    slots: SlotPool
    orphans: OrphanReaper
    materializer: Materializer
    compactor: Compactor
    stager: Stager
    adoption: CheckpointAdoption

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
    limits: ModelSettings,
    records: Iterable[CommitRecord],
    needed_elsewhere: Callable[[], Awaitable[frozenset[str]]] = nothing,
    origin: Callable[[], OriginNumbers | None] = lambda: None,
) -> Model:
    """Return a model with what the store holds of it.

    The caller opens the `store`; `segments` are closed with the model. Records of other models are
    passed over. `needed_elsewhere` is as in `GarbageCollector`, `origin` as in
    `CheckpointAdoption`.
    """
    model = _assembled(name, store, fetch, segments, limits, needed_elsewhere, origin)
    _join(model)
    await _load(model, records)
    return model


def _assembled(
    name: str,
    store: Store,
    fetch: FetchApi,
    segments: SegmentAllocator,
    limits: ModelSettings,
    needed_elsewhere: Callable[[], Awaitable[frozenset[str]]],
    origin: Callable[[], OriginNumbers | None],
) -> Model:
    disk = DiskQuota(store, limits.disk_floor_bytes)
    pins, layouts, events = Pins(name, store), KnownLayouts(), EventBus()
    table = VersionTable(name, pins, events, limits.reserved_version)
    serving = ServingState(table, pins)
    epochs = Epochs(name, store, partial(_catch_up, table, serving, store))
    commits = CommitService(table, epochs, pins, store, layouts, disk)
    collector = GarbageCollector(table, serving, commits, limits.retention, disk, needed_elsewhere)
    slots = SlotPool(
        limits.slots, segments, table, serving, commits, collector, durable=store.durable
    )
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
        events=events,
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
        accepted=LayoutCompatibility(table, commits),
        engine_layouts=EngineLayouts(),
        segments=segments,
        slots=slots,
        orphans=orphans,
        materializer=materializer,
        compactor=compactor,
        stager=stager,
        adoption=CheckpointAdoption(table, commits, slots, stager, orphans, store, fetch, origin),
    )


def _join(model: Model) -> None:
    """Lead back up what parts tell those that are above them."""
    events, orphans, compactor = model.events, model.orphans, model.compactor
    events.on(SlotFreed, lambda _: model.slots.wake())
    events.on(LiveReplaced, lambda event: orphans.settle(event.record))
    events.on(LeaseEnded, lambda event: orphans.settle(event.record))
    events.on(VersionCommitted, lambda _: model.collector.collect())
    events.on(SurplusFound, lambda event: compactor.consider(event.surplus, event.most_carried))
    events.on(SlotWanted, lambda _: compactor.stand_back())


async def _catch_up(table: VersionTable, serving: ServingState, store: Store) -> None:
    """Take up what other servers have committed to the same store."""
    for commit in await store.committed_elsewhere(table.name):
        if table.find(commit.version) is None:
            record = VersionRecord.committed(commit)
            record.base_on(table.find(commit.base_version))
            table.add(record)
    if not store.local:
        await serving.read_marks()


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
        record.base_on(table.find(base))
        model.serving.restore_marks(record)
