"""The answer of GetStatus, gathered from every part of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync import __version__, clock
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync_server.engine import EngineSet
    from weightsync_server.model import Model
    from weightsync_server.ops.disk_watch import DiskWatch
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.push import PushService
    from weightsync_server.workers.runtime.process_pool import ProcessPool

__all__ = ["Processes", "StatusSource"]


class Processes(NamedTuple):
    """What the server keeps running beside itself."""

    fetchers: ProcessPool
    ingesters: ProcessPool


class StatusSource:
    """Gathers the state of the server; every call tells the present.

    Args:
        model: The one model.
        pushes: Uploads.
        engines: Of this host.
        processes: Those that the server keeps.
        metrics: Where violations are counted.
        disks: What is written to.
    """

    def __init__(
        self,
        model: Model,
        pushes: PushService,
        engines: EngineSet,
        processes: Processes,
        metrics: Metrics,
        disks: DiskWatch,
    ) -> None:
        self._model = model
        self._pushes = pushes
        self._engines = engines
        self._processes = processes
        self._metrics = metrics
        self._disks = disks
        self._started_ns = clock.wall_ns()

    def __call__(self) -> pb.GetStatusResponse:
        """Return the state of the server."""
        budget, store = self._model.segments.budget, self._model.store
        answer = pb.GetStatusResponse(
            server_version=__version__,
            models=[self._model_status()],
            memory_reserved_bytes=budget.reserved,
            memory_limit_bytes=budget.limit,
            invariant_violations=self._metrics.violations(),
            fetchers=self._processes.fetchers.alive,
            ingest_processes=self._processes.ingesters.alive,
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
                for disk in self._disks.readings()
            ],
        )
        answer.start_time.FromNanoseconds(self._started_ns)
        return answer

    def _model_status(self) -> pb.ModelStatus:
        table, serving = self._model.table, self._model.serving
        live, back = serving.live, serving.rollback_to
        committed = (r.version for r in table.list() if r.durability == pb.DURABILITY_COMMITTED)
        engines = self._engines.status()
        good = pb.ENGINE_STATE_SERVING, pb.ENGINE_STATE_APPLYING
        worst = next((one for one in engines if one.state not in good), None)
        return pb.ModelStatus(
            model=table.name,
            live_version=live,
            live_content_digest=table.get(live).content_digest if live else "",
            rollback_version=back,
            rollback_resident=bool(back) and all(one.rollback_resident for one in engines),
            newest_version=max(committed, default=0),
            epoch=self._model.epochs.newest,
            engine=worst or next(iter(engines), None),
            engines=engines,
            slots=self._model.slots.status(),
            pushes=self._pushes.status(),
            apply_id=next((one.apply_id for one in engines if one.apply_id), ""),
            client_runs=self._model.runs.status(),
        )
