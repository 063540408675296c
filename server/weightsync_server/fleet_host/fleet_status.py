"""What a fleet's register says of its members, as messages of the API and as metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weightsync import __version__, clock
from weightsync.model.manifest import MAX_VERSION
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.coordination.coordination import CoordinationStore
from weightsync_server.decide import ApplyPhase, FleetVersion, Reports, Verdict
from weightsync_server.fleet import fleet_records
from weightsync_server.fleet.fleet_history import Apply, History, HistoryReader
from weightsync_server.fleet.fleet_member import FleetMember
from weightsync_server.fleet.fleet_records import MEMBERS, parse_reports, reports_prefix
from weightsync_server.fleet.member_steps import HostMode
from weightsync_server.ops.metrics import Metrics
from weightsync_server.store.store_records import decode_document

_DAMAGED = "unknown: its record in the register is damaged; restart its server"


def list_member(name: str, value: bytes) -> pb.FleetMember:
    """Return all that a member's record, in any format, tells, and whether its release is older.

    Nothing rests on it: what a record does not say, or says in another way, is left out.
    """
    try:
        record = decode_document(value)
    except ValueError:
        return pb.FleetMember(name=name, state=_DAMAGED)
    member = pb.FleetMember(
        name=name,
        address=_text(record, "address"),
        state=_text(record, "mode") or "unknown",
        release=_text(record, "release"),
        older=_is_older(record),
        reason=_text(record, "why"),
    )
    match record.get("live"):
        case [int(number), str(digest)] if 0 < number <= MAX_VERSION:
            member.live_version, member.content_digest = number, _clean(digest)
    return member


def no_member(key: str, name: str) -> pb.FleetMember:
    """Return what is told of a key among theirs that no process has put there."""
    return pb.FleetMember(
        name=_clean(name),
        state=_clean(f"remove {key} from the register: it belongs to no running member"),
        reason="no member waits for it",
    )


def no_key(key: str) -> pb.FleetMember:
    """Return what is told of a key that no fleet has made, in the list that people read."""
    state = _clean(f"remove {key} from the register: it is not a key of a fleet")
    return pb.FleetMember(name=_clean(key), state=state, reason="it is ignored")


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    return _clean(value) if isinstance(value, str) else ""


def _clean(text: str) -> str:
    # JSON may have halves of characters, which no message takes.
    return text.encode(errors="replace").decode()


def _is_older(record: Mapping[str, Any]) -> bool:
    """Tell whether a release older than this one wrote a record; the first did not say."""
    reads, newest = record.get("reads"), fleet_records.FORMAT
    if not isinstance(reads, int) or reads < newest:
        return True
    return reads == newest and _numbers(_text(record, "release")) < _numbers(__version__)


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", release)[:3]]


class FleetStatusReader:
    """Reads a register for people and for metrics."""

    def __init__(self, coordination: CoordinationStore) -> None:
        self._coordination = coordination
        self._reader = HistoryReader(coordination)

    async def status(self) -> pb.GetFleetStatusResponse:
        """Return all but what the answering member alone knows."""
        history = await self._reader.read()
        members = await self._members()
        real = [one for one in members if not one.state.startswith("no member")]
        status = pb.GetFleetStatusResponse(
            members=[*members, *map(no_key, sorted(history.foreign))],
            skew=max((_behind(history, one) for one in real), default=0),
            undecided=sum(one.state == HostMode.PAUSED for one in members),
        )
        if history.unreadable:
            status.newest.CopyFrom(unread_report(history.unreadable_number, history.unreadable))
        elif history.newest is not None:
            status.newest.CopyFrom(await self._report(history.newest, members))
        decided_unread = history.unreadable_commits or history.unreadable_decided
        if history.target is not None and not decided_unread:
            status.decided_version = history.target.number
            status.decided_digest = history.target.digest
        return status

    async def report(self, number: int) -> pb.FleetReport:
        """Return how far an apply has come; empty: it is not known any more."""
        history = await self._reader.read()
        found = [one for one in history.applies if one.plan.number == number]
        if not found:
            return pb.FleetReport()
        apply = await self._reader.whole(found[0])
        return await self._report(apply, await self._members())

    async def _members(self) -> list[pb.FleetMember]:
        alive, permanent = await self._coordination.members(MEMBERS)
        members = [list_member(key[len(MEMBERS) :], value) for key, value in alive.items()]
        members += [no_member(key, key[len(MEMBERS) :]) for key in permanent]
        return sorted(members, key=lambda one: one.name)

    async def _report(self, apply: Apply, present: list[pb.FleetMember]) -> pb.FleetReport:
        plan, outcome = apply.plan, apply.outcome
        listed = await self._coordination.list(reports_prefix(plan.number))
        reports = parse_reports(plan.number, listed, plan.nonce)
        return pb.FleetReport(
            apply=plan.number,
            version=plan.target.number,
            content_digest=plan.target.digest,
            decision=outcome.value if outcome is not None else "",
            reason=apply.reason if outcome is Verdict.ABORT else "",
            rollback_reason=plan.reason if plan.rejects else "",
            order=plan.order.value,
            decisions=len(apply.decisions),
            decisions_needed=plan.decisions,
            members=[_progress(name, plan.wave_of(name), reports) for name in sorted(plan.members)],
            fenced_others=[
                one.name
                for one in present
                if one.state == HostMode.FENCED and one.name not in plan.members
            ],
        )


def correct_own(status: pb.GetFleetStatusResponse, member: FleetMember) -> None:
    """Say of the member that answers what is so: its record may wait for the register."""
    for one in status.members:
        if one.name == member.state.name and not member.view.displaced:
            one.state, one.reason = member.state.mode, member.why


def unread_report(number: int, why: str, decision: str = "") -> pb.FleetReport:
    """Return what is told of an apply of which no more can be read than its number."""
    return pb.FleetReport(apply=number, decision=decision, reason=why)


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


class FleetMetrics:
    """Gauges of one member, read when they are scraped.

    `members` is how many the register had when they were counted last.
    """

    def __init__(self, metrics: Metrics, member: FleetMember) -> None:
        self._member = member
        self._decided: tuple[tuple[int, int], float] = ((0, 0), 0.0)
        self.members = 0
        metrics.track(
            "weightsync_fleet_members",
            "Members that the fleet's register has, as this one counted them last.",
            lambda: self.members,
        )
        metrics.track(
            "weightsync_fleet_skew",
            "Commits of the fleet that this member's engines have not followed.",
            self._skew,
        )
        metrics.track(
            "weightsync_fleet_undecided",
            "1 while this member serves nothing because it does not know what is decided.",
            self._undecided,
        )
        metrics.track(
            "weightsync_fleet_decision_age_seconds",
            "Time since this member read the fleet's newest decision; 0: it has read none.",
            self._age,
        )

    def look(self) -> None:
        """Take note of when a decision was read first."""
        newest = _newest(self._member.view.history)
        if newest != self._decided[0]:
            self._decided = newest, clock.monotonic()

    def _skew(self) -> float:
        history, live = self._member.view.history, self._member.host.live()
        if history is None or history.target in (None, live):
            return 0.0
        return float(len(history.missed(live)))

    def _undecided(self) -> float:
        state = self._member.state
        waits = self._member.view.why or self._member.view.history is None
        return float(
            state.mode is HostMode.PAUSED or (state.mode is HostMode.FENCED and bool(waits))
        )

    def _age(self) -> float:
        self.look()
        newest, since = self._decided
        return clock.monotonic() - since if newest[1] else 0.0


def _newest(history: History | None) -> tuple[int, int]:
    """Return the number of the newest apply that has a decision, and how many it has."""
    applies = history.applies if history is not None else ()
    found = [(one.plan.number, len(one.decisions)) for one in applies if one.decisions]
    return found[-1] if found else (0, 0)
