"""What a server reports of its parts: the answer of GetStatus, and gauges, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from weightsync import __version__, clock
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine import EngineSet
from weightsync_server.engine.apply_history import ApplyHistory
from weightsync_server.engine.apply_progress import furthest_behind
from weightsync_server.model import Model
from weightsync_server.ops.disk_watch import DiskReading, DiskWatch
from weightsync_server.ops.metrics import Metrics
from weightsync_server.push import PushService
from weightsync_server.workers.runtime.process_pool import ProcessPool

#: What changes nothing, and is not shown as the last apply.
_NO_CHANGE = (pb.APPLY_RESULT_ALREADY_LIVE, pb.APPLY_RESULT_PLANNED)
_SERVING = (pb.ENGINE_STATE_SERVING, pb.ENGINE_STATE_APPLYING)


@dataclass(frozen=True)
class AppliesStatus:
    """Ages, the last apply, and why the newest version is not live.

    `fleet` names the fleet that decides what is live; "": this host decides.
    """

    model: Model
    history: ApplyHistory
    fleet: str = ""

    def fill(self, status: pb.ModelStatus) -> None:
        """Add ages, the last apply, and why the newest version is not live."""
        table, now = self.model.table, clock.wall_ns()
        newest, live = table.find(status.newest_version), table.find(status.live_version)
        for record, age in ((live, status.live_age), (newest, status.newest_age)):
            if record is not None and record.commit is not None:
                age.FromNanoseconds(max(0, now - record.commit.commit_time_ns))
        last = next((r for r in self.history.newest_first() if r.result not in _NO_CHANGE), None)
        if last is not None:
            status.last_apply.CopyFrom(last)
            del status.last_apply.engines[:]
        if newest is not None:
            status.newest_not_live = self._why_not_live(newest, status)

    def _why_not_live(self, newest: VersionRecord, status: pb.ModelStatus) -> str:
        number, engines = newest.version, status.engines
        if status.live_version == number:
            return ""
        if status.apply_id:
            return f"apply {status.apply_id} is in progress"
        if reason := newest.rejected_reason:
            return f"set clear_rejected to apply it anyway: it is rejected ({reason})"
        if reason := newest.hold_reason:
            return f"apply it with clear_rejected to accept it: its gate held it ({reason})"
        if reason := newest.refused_reason:
            return f"push weights that the model takes: {reason}"
        if newest.damaged:
            return f"push it again: it is damaged in the store ({newest.damaged})"
        if not engines:
            return "start an engine: this server has none"
        for one in engines:
            if one.state not in _SERVING:
                state = pb.EngineState.Name(one.state).removeprefix("ENGINE_STATE_").lower()
                return f"engine {one.name} is {state}: {one.reason}"
        if failure := self._failure(number):
            return failure
        if serving := [one.name for one in engines if one.live_version == number]:
            return f"apply it to all engines: only {', '.join(serving)} of this host serves it"
        command = "fleet apply" if self.fleet else "apply"
        return f"run `weightsync {command} {number}`: no apply of it has been requested"

    def _failure(self, version: int) -> str:
        """Return why the last apply of a version has failed; "": it has not, or there was none."""
        applies = (r for r in self.history.newest_first() if r.result not in _NO_CHANGE)
        last = next((record for record in applies if record.version == version), None)
        if last is None or last.result == pb.APPLY_RESULT_APPLIED:
            return ""
        result = pb.ApplyResult.Name(last.result).removeprefix("APPLY_RESULT_").lower()
        when = last.time.ToDatetime()
        return f"its last apply, at {when:%Y-%m-%d %H:%M:%S} UTC, was {result}: {last.reason}"


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
    applies: AppliesStatus
    started_ns: int = field(default_factory=clock.wall_ns)
    started: float = field(default_factory=clock.boottime)

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
        answer.uptime.FromNanoseconds(int(1e9 * (clock.boottime() - self.started)))
        return answer

    def _model_status(self) -> pb.ModelStatus:
        table, serving = self.model.table, self.model.serving
        live, back = serving.live, serving.rollback_to
        committed = (r.version for r in table.list() if r.durability == pb.DURABILITY_COMMITTED)
        engines = self.engines.status()
        worst = next((one for one in engines if one.state not in _SERVING), None)
        status = pb.ModelStatus(
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
            running_apply=furthest_behind(engines),
        )
        self.applies.fill(status)
        return status


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
