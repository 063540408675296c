"""What a server reports of its parts: the answer of GetStatus, and gauges, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from weightsync import __version__, clock
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import EngineSet
from weightsync_server.model import Model
from weightsync_server.ops.disk_watch import DiskReading, DiskWatch
from weightsync_server.ops.metrics import Metrics
from weightsync_server.push import PushService
from weightsync_server.workers.runtime.process_pool import ProcessPool


@dataclass
class StatusSource:
    """Gathers the state of the server; every call tells the present."""

    model: Model
    pushes: PushService
    engines: EngineSet
    fetchers: ProcessPool
    ingesters: ProcessPool
    metrics: Metrics
    disks: DiskWatch
    started_ns: int = field(default_factory=clock.wall_ns)

    def track(self) -> None:
        """Have every gauge read at each scrape."""
        metrics = self.metrics
        _track_versions(metrics, self.model)
        _track_memory(metrics, self.model)
        _track_disks(metrics, self.disks)
        metrics.track(
            "weightsync_fetchers", "Fetcher processes alive.", lambda: self.fetchers.alive
        )
        metrics.track(
            "weightsync_ingest_processes",
            "Ingest processes that listen.",
            lambda: self.ingesters.alive,
        )
        metrics.track(
            "weightsync_inflight_pushes", "Pushes open.", lambda: len(self.pushes.status())
        )
        started = self.started_ns / 1e9
        metrics.track("weightsync_start_time_seconds", "Start, Unix time.", lambda: started)

    def __call__(self) -> pb.GetStatusResponse:
        """Return the state of the server."""
        budget, store = self.model.segments.budget, self.model.store
        answer = pb.GetStatusResponse(
            server_version=__version__,
            models=[self._model_status()],
            memory_reserved_bytes=budget.reserved,
            memory_limit_bytes=budget.limit,
            invariant_violations=self.metrics.violations(),
            fetchers=self.fetchers.alive,
            ingest_processes=self.ingesters.alive,
            store=store.url,
            durable=store.durable,
            disks=[
                pb.DiskStatus(
                    folder=disk.name,
                    path=disk.path,
                    free_bytes=disk.free_bytes,
                    used_bytes=disk.used_bytes,
                    error=disk.error,
                )
                for disk in self.disks.readings()
            ],
        )
        answer.start_time.FromNanoseconds(self.started_ns)
        return answer

    def _model_status(self) -> pb.ModelStatus:
        table, serving = self.model.table, self.model.serving
        live, back = serving.live, serving.rollback_to
        committed = (r.version for r in table.list() if r.durability == pb.DURABILITY_COMMITTED)
        engines = self.engines.status()
        good = pb.ENGINE_STATE_SERVING, pb.ENGINE_STATE_APPLYING
        worst = next((one for one in engines if one.state not in good), None)
        return pb.ModelStatus(
            model=table.name,
            live_version=live,
            live_content_digest=table.get(live).content_digest if live else "",
            rollback_version=back,
            rollback_resident=bool(back) and all(one.rollback_resident for one in engines),
            newest_version=max(committed, default=0),
            epoch=self.model.epochs.newest,
            engine=worst or next(iter(engines), None),
            engines=engines,
            slots=self.model.slots.status(),
            pushes=self.pushes.status(),
            apply_id=next((one.apply_id for one in engines if one.apply_id), ""),
            client_runs=self.model.runs.status(),
        )


def _track_versions(metrics: Metrics, model: Model) -> None:
    table = model.table

    def committed_ns() -> int:
        """Of the oldest version that an engine serves."""
        served = [record for record in table.list() if record.serving == pb.SERVING_LIVE]
        return min((r.commit.commit_time_ns for r in served if r.commit), default=0)

    def chain() -> int:
        newest = table.find(table.newest)
        return len(newest.chain) - 1 if newest is not None else 0

    metrics.track_served_age(committed_ns)
    metrics.track(
        "weightsync_newest_version", "Newest committed version; 0: none.", lambda: table.newest
    )
    metrics.track(
        "weightsync_damaged_versions",
        "Committed versions that are damaged in the store.",
        lambda: sum(bool(record.damaged) for record in table.list()),
    )
    metrics.track(
        "weightsync_delta_chain_length",
        "Deltas of which the newest version is made; 0: none.",
        chain,
    )
    metrics.track(
        "weightsync_disk_promised_bytes",
        "Room in the store that open pushes were promised and have not used yet.",
        lambda: model.disk.promised,
    )


def _track_memory(metrics: Metrics, model: Model) -> None:
    budget, slots = model.segments.budget, model.slots
    metrics.track(
        "weightsync_staging_reserved_bytes", "Shared memory reserved.", lambda: budget.reserved
    )
    metrics.track(
        "weightsync_staging_bytes",
        "Shared memory in use by versions.",
        lambda: sum(slot.used_bytes for slot in slots.status()),
    )
    metrics.track(
        "weightsync_staging_capacity_bytes", "Most shared memory allowed.", lambda: budget.limit
    )
    metrics.track(
        "weightsync_slots_used",
        "Slots that hold a version.",
        lambda: sum(slot.state in ("receiving", "staged", "live") for slot in slots.status()),
    )
    metrics.track("weightsync_slots", "Slots configured.", lambda: len(slots.slots))


#: What is shown of each disk, its help, and how it is read.
_OF_DISKS: tuple[tuple[str, str, Callable[[DiskReading], float]], ...] = (
    ("free_bytes", "What can still be written to the disk of a folder.", lambda r: r.free_bytes),
    ("used_bytes", "What is in use on the disk of a folder.", lambda r: r.used_bytes),
    (
        "full",
        "1 while nothing more is written to a folder: full, read-only, or its disk hangs.",
        lambda r: bool(r.error),
    ),
)


def _track_disks(metrics: Metrics, disks: DiskWatch) -> None:
    names = [folder.name for folder in disks.folders]
    for suffix, text, value in _OF_DISKS:
        gauges = metrics.gauges(f"weightsync_disk_{suffix}", text, "folder", names)
        for name, gauge in gauges.items():
            gauge.set_function(partial(_of_disk, disks, name, value))


def _of_disk(disks: DiskWatch, name: str, value: Callable[[DiskReading], float]) -> float:
    return value(disks.reading(name))
