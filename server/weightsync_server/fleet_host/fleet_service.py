"""This server's part in its fleet: a member that follows it, and calls that steer it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, NamedTuple

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import idempotency
from weightsync_server.engine.pause_options import pause_spec
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_keys import MEMBERS
from weightsync_server.fleet.fleet_member import FleetMember
from weightsync_server.fleet.fleet_plan import FleetVersion, Kind, Verdict
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.member_steps import Fence, Mode, next_step
from weightsync_server.fleet_host.fleet_host import FleetHost
from weightsync_server.fleet_host.fleet_metrics import FleetMetrics
from weightsync_server.fleet_host.fleet_needs import FleetNeeds
from weightsync_server.fleet_host.fleet_status import FleetStatusReader
from weightsync_server.register import open_register
from weightsync_server.register.etcd_tls import EtcdTls

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync.engine import PauseSpec
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine import EngineSet, HostParts, ModelParts
    from weightsync_server.fleet.coordinator import FleetProgress, Outcome
    from weightsync_server.fleet.fleet_limits import FleetLimits
    from weightsync_server.register.register import Register

__all__ = ["FleetOptions", "FleetService", "watch_needs"]

logger = logging.getLogger(__name__)

#: Until a member that has failed by a fault of its own goes on, seconds.
_AGAIN_S = 5.0
_KINDS = {
    pb.ENGINE_ORDER_UNSPECIFIED: Kind.ROLLING,
    pb.ENGINE_ORDER_ROLLING: Kind.ROLLING,
    pb.ENGINE_ORDER_TOGETHER: Kind.BARRIER,
}


class FleetOptions(NamedTuple):
    """What a member needs to know of the settings.

    Attributes:
        fleet: Its fleet's name.
        register: URL of the register, without that name.
        tls: Files for an etcds:// register; None: none are given.
        member: Its name.
        limits: How long to wait.
        max_unavailable: Members of a wave, where a call does not say.
        journal: Path of its file.
        follows: Whether versions come from an origin, so that one may be on its way.
    """

    fleet: str
    register: str
    tls: EtcdTls | None
    member: str
    limits: FleetLimits
    max_unavailable: int
    journal: Path
    follows: bool


class FleetService:
    """A member; `begin` before engines are started, `start` when calls are taken.

    Args:
        options: Of what.
        engines: What it drives.
        model: What they serve.
        host: What they share.

    Attributes:
        name: Of the fleet.
        needs: What its members still need of a store.

    Raises:
        WeightSyncError: The register cannot be opened, or the member's journal is damaged.
    """

    def __init__(
        self, options: FleetOptions, engines: EngineSet, model: ModelParts, host: HostParts
    ) -> None:
        self.name, self._options = options.fleet, options
        self.register = _open_register(options)
        fetch_s = host.limits.prepare_timeout_s if options.follows else 0.0
        self.host = FleetHost(engines, model, host, options.limits.undecided_s, fetch_s)
        self._journal = MemberJournal(options.journal)
        self._member: FleetMember | None = None
        self._calls = idempotency.Calls()
        self._status = FleetStatusReader(self.register)
        self.needs = FleetNeeds(self.register)
        self._metrics = host.metrics
        if options.limits.max_age_s:
            host.serving_time.left_s = self._left_s
        host.serving_time.begins_s = self._permitted_s
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def of(
        cls,
        options: FleetOptions | None,
        engines: EngineSet,
        model: ModelParts,
        host: HostParts,
    ) -> FleetService | None:
        """Return the member that options describe; None: this server is one of no fleet."""
        return cls(options, engines, model, host) if options is not None else None

    def start(self, address: str) -> None:
        """Join, as what listens at an address."""
        options = self._options
        self._member = FleetMember(
            self.register, options.member, self.host, self._journal, options.limits, address
        )
        self._tasks = [
            asyncio.create_task(self._run(self._member), name="fleet member"),
            asyncio.create_task(self._count(FleetMetrics(self._metrics, self._member))),
        ]

    async def leave(self) -> None:
        """Follow the fleet no longer, with the host as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.host.stop()

    async def stop(self) -> None:
        """Let go of the register, after `leave`."""
        await self.register.close()

    async def apply(self, request: pb.ApplyVersionRequest) -> pb.ApplyVersionResponse:
        """Have every member serve a version, or none; returns when that is decided and done.

        Raises:
            WeightSyncError: APPLY_RESTORED: it was decided against it. REQUEST_INVALID, and as
                `Coordinator.apply`.
        """
        kind = _check(request, request.max_unavailable)
        pause = _chosen_pause(request)
        if not request.version or request.dry_run:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "a fleet goes to a version that is named, without dry_run; name one of "
                "ListVersions, or plan on each host",
            )
        size = request.max_unavailable or self._options.max_unavailable
        key = request.idempotency_key

        async def carry_out() -> pb.ApplyVersionResponse:
            target = await self.host.find(request.version)
            outcome = await self._coordinator().apply(
                target, kind, size, key, pause, clears=request.clear_rejected
            )
            return pb.ApplyVersionResponse(fleet=await self._report(outcome))

        return await self._calls.run(key, request, carry_out)

    async def rollback(self, request: pb.RollbackRequest) -> pb.RollbackResponse:
        """Have every member go back to what was decided before, and reject what is left.

        Raises:
            WeightSyncError: As `apply`, and NO_ROLLBACK.
        """
        kind = _check(request, request.max_unavailable)
        pause = _chosen_pause(request)
        size = request.max_unavailable or self._options.max_unavailable
        key = request.idempotency_key

        async def carry_out() -> pb.RollbackResponse:
            outcome = await self._coordinator().rollback(kind, size, key, pause, request.reason)
            return pb.RollbackResponse(fleet=await self._report(outcome))

        return await self._calls.run(key, request, carry_out)

    async def abort(self, request: pb.AbortFleetApplyRequest) -> pb.AbortFleetApplyResponse:
        """Try to decide against the apply that runs, and return what was decided, if one does.

        Raises:
            WeightSyncError: As `Coordinator.abort`.
        """
        outcome = await self._coordinator().abort(request.reason)
        if outcome is None:
            return pb.AbortFleetApplyResponse()
        report = await self._status.report(outcome.number)
        if not report.apply:
            # Nothing else of it can be read.
            number, decision = outcome.number, outcome.verdict.value
            report = pb.FleetReport(apply=number, decision=decision, reason=outcome.reason)
        return pb.AbortFleetApplyResponse(fleet=report)

    async def status(self) -> pb.GetFleetStatusResponse:
        """Return what the register says now.

        Raises:
            WeightSyncError: It cannot be read.
        """
        status = await self._status.status()
        status.fleet, status.register = self.name, self.register.url
        status.member = self._options.member
        view = self._member.view if self._member is not None else None
        if view is not None and view.history is not None:
            status.read_age.FromNanoseconds(int(1e9 * (clock.boottime() - view.read_at)))
        return status

    def _left_s(self) -> float | None:
        """Return for how long the engines may serve on what was read; None: it lets them not."""
        member, limits = self._member, self._options.limits
        history = member.view.history if member is not None else None
        if member is None or history is None:
            return None
        state = member.state
        step = next_step(state, history, limits.max_skew)
        if isinstance(step, Fence) and state.mode is not Mode.PAUSED:
            # What was read is why they must not: it gives them no time.
            return None
        return member.view.read_at + limits.max_age_s - clock.boottime()

    def _permitted_s(self, record: VersionRecord | None) -> float | None:
        """Return for how long an engine may begin to serve a version, as `ServingTime`."""
        if self._member is None:
            return None
        live = FleetVersion(record.version, record.content_digest) if record is not None else None
        return self._member.permitted_s(live)

    async def _run(self, member: FleetMember) -> None:
        while True:
            try:
                await member.run()
            except Exception:
                logger.exception("this server's part in its fleet is begun anew")
            await asyncio.sleep(_AGAIN_S)

    async def _count(self, metrics: FleetMetrics) -> None:
        while True:
            with contextlib.suppress(WeightSyncError):
                metrics.members = len((await self.register.members(MEMBERS)).alive)
            metrics.look()
            self._look_ahead()
            await asyncio.sleep(self._options.limits.poll_s)

    def _look_ahead(self) -> None:
        """Let the host have what it will be asked for, also before the turn of its wave."""
        history = self._member.view.history if self._member is not None else None
        running = history.running if history is not None else None
        self.host.expect(running.plan.target if running is not None else None)

    def _coordinator(self) -> Coordinator:
        options = self._options
        return Coordinator(self.register, options.member, options.limits, _ProgressLog())

    async def _report(self, outcome: Outcome) -> pb.FleetReport:
        if outcome.verdict is Verdict.ABORT:
            raise WeightSyncError(
                Reason.APPLY_RESTORED,
                f"the fleet decided against version {outcome.target.number} "
                f"({outcome.reason or 'no reason is known'}); its members go back to what they "
                "served, see `weightsync fleet status`",
                metadata={"fleet_apply": str(outcome.number)},
            )
        report = await self._status.report(outcome.number)
        if report.apply:
            return report
        # Long ago, and asked for again with its key.
        target = outcome.target
        return pb.FleetReport(
            apply=outcome.number,
            version=target.number,
            content_digest=target.digest,
            decision=outcome.verdict.value,
        )


def watch_needs(options: FleetOptions, stack: contextlib.AsyncExitStack) -> FleetNeeds:
    """Return what a fleet needs of the store of a server without engines, which is no member.

    Args:
        options: Of what.
        stack: Closes the register.

    Raises:
        WeightSyncError: The register cannot be opened.
    """
    register = _open_register(options)
    stack.push_async_callback(register.close)
    return FleetNeeds(register)


def _open_register(options: FleetOptions) -> Register:
    return open_register(f"{options.register.rstrip('/')}/{options.fleet}", options.tls)


def _check(request: idempotency.Request, max_unavailable: int) -> Kind:
    kind = _KINDS.get(request.order)
    if kind is None:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "order must be TOGETHER or ROLLING; leave it out for ROLLING in a fleet",
        )
    if request.engine:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "a fleet has all engines of every host; leave out the engine's name, or the scope",
        )
    if max_unavailable and kind is Kind.BARRIER:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "max_unavailable goes with order ROLLING; leave it out, or set the order",
        )
    return kind


def _chosen_pause(request: idempotency.Request) -> PauseSpec | None:
    """Return how members pause; None: as where nobody chooses, which every release can read."""
    spec = pause_spec(request.pause)
    return spec if spec != pause_spec(pb.PauseOptions()) else None


class _ProgressLog:
    """Logs each change."""

    def __init__(self) -> None:
        self._last: FleetProgress | None = None

    def __call__(self, progress: FleetProgress) -> None:
        if progress == self._last:
            return
        self._last = progress
        logger.info(
            "apply %d of the fleet: %d of %d decisions; %d prepared, %d ready, %d done",
            progress.number,
            progress.decided,
            progress.decisions,
            progress.prepared,
            progress.ready,
            progress.done,
        )
