"""What a coordinator does next, as a function of what is in the register: it keeps no state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync_server.fleet.fleet_keys import reports_prefix
from weightsync_server.fleet.fleet_plan import ApplyPhase, Kind, MemberReport, Verdict
from weightsync_server.fleet.fleet_records import decode_report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from weightsync_server.fleet.fleet_history import Apply

__all__ = ["Decide", "Order", "OrderPause", "Reports", "next_order", "parse_reports"]

_SHOWN = 5


@dataclass(frozen=True)
class Reports:
    """What members have said of one apply, by phase and name."""

    by_phase: Mapping[ApplyPhase, Mapping[str, MemberReport]] = field(default_factory=dict)

    def of(self, phase: ApplyPhase) -> Mapping[str, MemberReport]:
        """Return the reports on a phase."""
        return self.by_phase.get(phase, {})

    def lacking(self, phase: ApplyPhase, members: Iterable[str]) -> list[str]:
        """Return those who have not said that they have come to its end."""
        found = self.of(phase)
        return sorted(name for name in members if not (name in found and found[name].ok))

    @property
    def refusal(self) -> str:
        """The first refusal, one sentence; "": there is none."""
        for phase, found in sorted(self.by_phase.items()):
            for name, report in sorted(found.items()):
                if not report.ok:
                    return f"{name} is not {phase}: {report.reason}"
        return ""


@dataclass(frozen=True)
class Decide:
    """Try to decide."""

    step: int
    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class OrderPause:
    """Let a barrier's members pause."""


Order = Decide | OrderPause


def parse_reports(number: int, keys: Mapping[str, bytes]) -> Reports:
    """Return the reports on an apply; one that cannot be read says that nothing was done.

    Args:
        number: Of the apply.
        keys: Those below `reports_prefix(number)`, with values.
    """
    found: dict[ApplyPhase, dict[str, MemberReport]] = {}
    for key, value in keys.items():
        phase, _, name = key.removeprefix(reports_prefix(number)).partition("/")
        try:
            report = decode_report(value)
        except WeightSyncError as error:
            report = MemberReport(ok=False, reason=error.message)
        found.setdefault(ApplyPhase(phase), {})[name] = report
    return Reports(found)


def next_order(
    apply: Apply,
    reports: Reports,
    present: frozenset[str],
    gone: frozenset[str] = frozenset(),
    *,
    late: bool = False,
) -> Order | None:
    """Return what brings an apply on; None: nothing does now.

    Args:
        apply: It, undecided.
        reports: Read after it.
        present: Members that are there, read after it.
        gone: Members that are not there, and were not for some time: nobody waits for them.
        late: Its time is over.
    """
    plan, step = apply.plan, apply.step
    if refusal := reports.refusal:
        return Decide(step, Verdict.ABORT, refusal)
    waiting = _waiting(apply, reports)
    if not waiting and plan.kind is Kind.BARRIER and (strangers := present - plan.members):
        return Decide(step, Verdict.ABORT, f"{_names(strangers)} appeared meanwhile; apply again")
    if waiting is None:
        return OrderPause()
    if not waiting:
        return Decide(step, Verdict.COMMIT)
    if lost := gone.intersection(waiting):
        why = "gone from the fleet's register; apply again, without it unless its server is back"
        return Decide(step, Verdict.ABORT, f"{_names(lost)} is {why}")
    if late:
        return Decide(step, Verdict.ABORT, f"{_names(waiting)} did not answer in time")
    return None


def _waiting(apply: Apply, reports: Reports) -> list[str] | None:
    """Return for whom the next decision waits; None: it waits for the word to pause."""
    plan, step = apply.plan, apply.step
    if plan.kind is Kind.BARRIER:
        if lacking := reports.lacking(ApplyPhase.PREPARED, plan.members):
            return lacking
        return reports.lacking(ApplyPhase.READY, plan.members) if apply.pause else None
    before = reports.lacking(ApplyPhase.DONE, plan.waves[step - 2]) if step > 1 else []
    if before or step > len(plan.waves):
        return before
    return reports.lacking(ApplyPhase.PREPARED, plan.waves[step - 1])


def _names(members: Iterable[str]) -> str:
    names = sorted(members)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
