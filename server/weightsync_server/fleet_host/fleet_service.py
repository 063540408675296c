"""This server's part in its fleet: a member that follows it, and calls that steer it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from weightsync import clock
from weightsync.engine import PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.coordination import open_register
from weightsync_server.coordination.coordination import CoordinationStore
from weightsync_server.decide import ApplyOrder, DecisionPlan, FleetVersion, Verdict
from weightsync_server.engine import EngineContext, EngineSet, idempotency
from weightsync_server.engine.gate import check_gate, pack_options
from weightsync_server.engine.refusals import pause_spec
from weightsync_server.fleet.coordinator import Coordinator, Outcome
from weightsync_server.fleet.fleet_history import History, HistoryReader
from weightsync_server.fleet.fleet_member import FleetMember
from weightsync_server.fleet.fleet_records import MEMBERS, decode_member
from weightsync_server.fleet.fleet_settings import FleetSettings
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet.member_steps import Fence, HostMode, next_step
from weightsync_server.fleet_host.fleet_host import FetchOnDemand, LocalHost
from weightsync_server.fleet_host.fleet_status import (
    FleetMetrics,
    FleetStatusReader,
    correct_own,
    unread_report,
)

logger = logging.getLogger(__name__)


class FleetNeeds:
    """Reads what members serve, and where they may go by what is planned or decided.

    Until a fleet's register is open, everything is needed; a host without a `fleet` needs nothing.
    """

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._read: tuple[CoordinationStore, HistoryReader] | None = None

    def open(self, options: FleetSettings, stack: contextlib.AsyncExitStack) -> CoordinationStore:
        """Read the register of a fleet from now on, and return it; the stack closes it."""
        coordination = open_register(f"{options.register.rstrip('/')}/{options.fleet}", options.tls)
        stack.push_async_callback(coordination.close)
        self.read(coordination)
        return coordination

    def read(self, coordination: CoordinationStore) -> None:
        self._read = coordination, HistoryReader(coordination)

    async def contents(self) -> frozenset[str]:
        """Return the digests of what members serve, go to, and would go back to.

        A plan that begins after this call may name any other version: who finds it gone is not
        ready for it. If this raises, the register cannot be read, and everything is needed.
        """
        if not self._fleet:
            return frozenset()
        if self._read is None:
            raise WeightSyncError(
                Reason.ENGINE_AWAY, f"the register of fleet {self._fleet} is not open yet"
            )
        coordination, reader = self._read
        # Members first: what they go to meanwhile is in the history.
        members, _ = await coordination.members(MEMBERS)
        history = await reader.read()
        if history.unreadable:
            raise WeightSyncError(Reason.NOT_SUPPORTED, history.unreadable)
        served = (decode_member(value)[0] for value in members.values())
        needed = [*served, *_planned(history)]
        return frozenset(version.digest for version in needed if version is not None)


def _planned(history: History) -> Iterator[FleetVersion | None]:
    if history.newest is not None:
        yield history.newest.plan.target
        yield history.newest.plan.previous
    commits = [one.plan for one in history.commits]
    if not commits:
        return
    live = commits[-1].target
    yield live
    before = [commits[0].previous, *(plan.target for plan in commits[:-1])]
    # What a rollback would go to.
    good = (one for one in reversed(before) if one is not None and one.digest != live.digest)
    yield next((one for one in good if one.digest not in history.rejects), None)


#: Until a member that has failed by a fault of its own goes on, seconds.
_AGAIN_S = 5.0
_KINDS = {
    pb.ENGINE_ORDER_UNSPECIFIED: ApplyOrder.ROLLING,
    pb.ENGINE_ORDER_ROLLING: ApplyOrder.ROLLING,
    pb.ENGINE_ORDER_TOGETHER: ApplyOrder.BARRIER,
}


class FleetService:
    """A member; `host.begin` before engines are started, `start` when calls are taken.

    `source` is as in `LocalHost`. `name` is that of the fleet, whose `coordination` the caller
    closes after `leave`.
    """

    def __init__(
        self,
        options: FleetSettings,
        coordination: CoordinationStore,
        journal: Path,
        engines: EngineSet,
        context: EngineContext,
        source: Callable[[], FetchOnDemand | None] = lambda: None,
    ) -> None:
        self.name, self._options = options.fleet, options
        self.coordination = coordination
        self.host = LocalHost(
            engines, context, options.limits.undecided_s, source, self._newest_plan, options.member
        )
        self._journal = MemberJournal(journal, options.fleet)
        self._member: FleetMember | None = None
        self._calls = idempotency.Calls()
        self._status = FleetStatusReader(self.coordination)
        self._metrics, self._applies = context.metrics, context.history
        if options.limits.max_age_s:
            context.serving_time.left_s = self._left_s
        context.serving_time.begins_s = self._permitted_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, address: str) -> None:
        options = self._options
        self._member = FleetMember(
            self.coordination, options.member, self.host, self._journal, options.limits, address
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

    async def apply(self, request: pb.ApplyVersionRequest, who: str) -> pb.ApplyVersionResponse:
        """Have every member serve a version, or none; returns when that is decided and done.

        The history of this server shows `who` asked.

        Raises:
            WeightSyncError: APPLY_RESTORED: it was decided against it. As `Coordinator.apply`.
        """
        kind = _check(request, request.max_unavailable)
        pause = _chosen_pause(request)
        check_gate(request.gate, pause_spec(request.pause))
        if not request.version or request.dry_run:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "name a version from ListVersions, without dry_run, or plan on each host: a "
                "fleet applies a named version",
            )
        size = request.max_unavailable or self._options.max_unavailable
        key = request.idempotency_key

        async def carry_out() -> pb.ApplyVersionResponse:
            entry = _entry(request, pb.APPLY_KIND_FLEET_APPLY, who)
            entry.version = request.version
            with self._applies.recorded(entry):
                target = await self.host.find(request.version)
                outcome = await self._coordinator().apply(
                    target,
                    kind,
                    size,
                    key,
                    pause,
                    clears=request.clear_rejected,
                    gate=pack_options(request.gate),
                )
                return pb.ApplyVersionResponse(fleet=await self._report(outcome, entry))

        return await self._calls.run(key, request, carry_out)

    async def rollback(self, request: pb.RollbackRequest, who: str) -> pb.RollbackResponse:
        """Have every member go back to what was decided before, and reject what is left."""
        kind = _check(request, request.max_unavailable)
        pause = _chosen_pause(request)
        size = request.max_unavailable or self._options.max_unavailable
        key = request.idempotency_key

        async def carry_out() -> pb.RollbackResponse:
            entry = _entry(request, pb.APPLY_KIND_FLEET_ROLLBACK, who)
            entry.cause = request.reason
            with self._applies.recorded(entry):
                outcome = await self._coordinator().rollback(kind, size, key, pause, request.reason)
                return pb.RollbackResponse(fleet=await self._report(outcome, entry))

        return await self._calls.run(key, request, carry_out)

    async def abort(self, request: pb.AbortFleetApplyRequest) -> pb.AbortFleetApplyResponse:
        """Try to decide against the apply that runs, and return what was decided, if one does."""
        outcome = await self._coordinator().abort(request.reason)
        if outcome is None:
            return pb.AbortFleetApplyResponse()
        report = await self._status.report(outcome.number)
        if not report.apply:
            # Nothing else of it can be read.
            report = unread_report(outcome.number, outcome.reason, outcome.verdict.value)
        return pb.AbortFleetApplyResponse(fleet=report)

    async def status(self) -> pb.GetFleetStatusResponse:
        status = await self._status.status()
        status.fleet, status.register = self.name, self.coordination.url
        status.member = self._options.member
        view = self._member.view if self._member is not None else None
        if self._member is not None:
            correct_own(status, self._member)
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
        if isinstance(step, Fence) and state.mode is not HostMode.PAUSED:
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
                logger.exception("this server's part in its fleet failed, and is started again")
            await asyncio.sleep(_AGAIN_S)

    async def _count(self, metrics: FleetMetrics) -> None:
        while True:
            try:
                metrics.members = len((await self.coordination.members(MEMBERS)).alive)
            except WeightSyncError:
                pass
            except Exception:
                logger.exception("the members of the fleet cannot be counted")
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
        return Coordinator(self.coordination, options.member, options.limits, self._journal)

    def _newest_plan(self, target: FleetVersion) -> DecisionPlan | None:
        """Return the plan of the newest apply, if it goes to a version."""
        history = self._member.view.history if self._member is not None else None
        newest = history.newest if history is not None else None
        return newest.plan if newest is not None and newest.plan.target == target else None

    async def _report(self, outcome: Outcome, entry: pb.ApplyRecord) -> pb.FleetReport:
        entry.fleet_apply, entry.version = outcome.number, outcome.target.number
        if outcome.verdict is Verdict.ABORT:
            raise WeightSyncError(
                Reason.APPLY_RESTORED,
                f"the fleet decided against version {outcome.target.number} "
                f"({outcome.reason or 'no reason is known'}); its members return to the version "
                "they served; see `weightsync fleet status`",
                metadata={"fleet_apply": str(outcome.number)},
            )
        entry.result, entry.content_digest = pb.APPLY_RESULT_APPLIED, outcome.target.digest
        report = await self._status.report(outcome.number)
        if report.apply:
            report.reason = outcome.reason
            return report
        # Long ago, and asked for again with its key.
        target = outcome.target
        return pb.FleetReport(
            apply=outcome.number,
            version=target.number,
            content_digest=target.digest,
            decision=outcome.verdict.value,
        )


def _entry(request: idempotency.Request, kind: pb.ApplyKind.ValueType, who: str) -> pb.ApplyRecord:
    order = request.order or pb.ENGINE_ORDER_ROLLING
    return pb.ApplyRecord(kind=kind, requested_by=who, order=order)


def _check(request: idempotency.Request, max_unavailable: int) -> ApplyOrder:
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
    if max_unavailable and kind is ApplyOrder.BARRIER:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "max_unavailable goes with order ROLLING; leave it out, or set the order",
        )
    return kind


def _chosen_pause(request: idempotency.Request) -> PauseSpec | None:
    """Return how members pause; None: as where nobody chooses, which every release can read."""
    spec = pause_spec(request.pause)
    return spec if spec != pause_spec(pb.PauseOptions()) else None
