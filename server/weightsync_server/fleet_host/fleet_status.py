"""What a fleet's register says, as messages of the API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.fleet.coordinator_steps import parse_reports
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_keys import MEMBERS, reports_prefix
from weightsync_server.fleet.fleet_plan import ApplyPhase, FleetVersion, Verdict
from weightsync_server.fleet.member_steps import Mode
from weightsync_server.fleet_host.member_listing import list_member, no_member

if TYPE_CHECKING:
    from weightsync_server.fleet.coordinator_steps import Reports
    from weightsync_server.fleet.fleet_history import Apply, History
    from weightsync_server.register.register import Register

__all__ = ["FleetStatusReader"]


class FleetStatusReader:
    """Reads a register for people and for metrics.

    Args:
        register: The fleet's.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._reader = HistoryReader(register)

    async def status(self) -> pb.GetFleetStatusResponse:
        """Return all but what the answering member alone knows.

        Raises:
            WeightSyncError: The register cannot be read.
        """
        history = await self._reader.read()
        members = await self._members()
        status = pb.GetFleetStatusResponse(
            members=members,
            skew=max((_behind(history, one) for one in members), default=0),
            undecided=sum(one.state == Mode.PAUSED for one in members),
        )
        if history.newest is not None:
            status.newest.CopyFrom(await self._report(history.newest, members))
        if history.target is not None:
            status.decided_version = history.target.number
            status.decided_digest = history.target.digest
        return status

    async def report(self, number: int) -> pb.FleetReport:
        """Return how far an apply has come; empty: it is not known any more.

        Raises:
            WeightSyncError: The register cannot be read.
        """
        history = await self._reader.read()
        found = [one for one in history.applies if one.plan.number == number]
        if not found:
            return pb.FleetReport()
        return await self._report(found[0], await self._members())

    async def _members(self) -> list[pb.FleetMember]:
        alive, permanent = await self._register.members(MEMBERS)
        members = [list_member(key[len(MEMBERS) :], value) for key, value in alive.items()]
        members += [no_member(key, key[len(MEMBERS) :]) for key in permanent]
        return sorted(members, key=lambda one: one.name)

    async def _report(self, apply: Apply, present: list[pb.FleetMember]) -> pb.FleetReport:
        plan, outcome = apply.plan, apply.outcome
        listed = await self._register.list(reports_prefix(plan.number))
        reports = parse_reports(plan.number, listed)
        return pb.FleetReport(
            apply=plan.number,
            version=plan.target.number,
            content_digest=plan.target.digest,
            decision=outcome.value if outcome is not None else "",
            reason=apply.reason if outcome is Verdict.ABORT else "",
            rollback_reason=plan.reason if plan.rejects else "",
            order=plan.kind.value,
            decisions=len(apply.decisions),
            decisions_needed=plan.decisions,
            members=[_progress(name, plan.wave_of(name), reports) for name in sorted(plan.members)],
            fenced_others=[
                one.name
                for one in present
                if one.state == Mode.FENCED and one.name not in plan.members
            ],
        )


def _behind(history: History, member: pb.FleetMember) -> int:
    live = FleetVersion(member.live_version, member.content_digest)
    return 0 if history.target == live else len(history.missed(live))


def _progress(name: str, wave: int, reports: Reports) -> pb.FleetMemberReport:
    said = {phase: reports.of(phase).get(name) for phase in ApplyPhase}
    whole = {phase: report is not None and report.ok for phase, report in said.items()}
    reasons = [report.reason for report in said.values() if report is not None and not report.ok]
    return pb.FleetMemberReport(
        name=name,
        wave=wave,
        prepared=whole[ApplyPhase.PREPARED],
        ready=whole[ApplyPhase.READY],
        done=whole[ApplyPhase.DONE],
        reason=reasons[0] if reasons else "",
    )
