"""What is read of the server's parts whenever its metrics are scraped."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.model import Model
    from weightsync_server.ops.disk_watch import DiskReading, DiskWatch
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.push import PushService
    from weightsync_server.status import Processes

__all__ = ["track"]


def track(
    metrics: Metrics,
    model: Model,
    processes: Processes,
    pushes: PushService,
    disks: DiskWatch,
) -> None:
    """Have every gauge read at each scrape.

    Args:
        metrics: Where they are shown.
        model: The one model.
        processes: Those that the server keeps.
        pushes: Uploads.
        disks: What is written to.
    """
    _track_versions(metrics, model)
    _track_memory(metrics, model)
    _track_disks(metrics, disks)
    metrics.track(
        "weightsync_fetchers", "Fetcher processes alive.", lambda: processes.fetchers.alive
    )
    metrics.track(
        "weightsync_ingest_processes",
        "Ingest processes that listen.",
        lambda: processes.ingesters.alive,
    )
    metrics.track(
        "weightsync_inflight_pushes",
        "Pushes open.",
        lambda: len(pushes.status()),
    )
    started = clock.wall()
    metrics.track("weightsync_start_time_seconds", "Start, Unix time.", lambda: started)


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
