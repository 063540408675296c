"""What participants do together, hosts of a fleet or engines of a host, and what is decided next.

Pure: no state, no clock, no effect. Of hosts a key in the coordination store is the decision, see
`fleet.coordinator`; of engines a record in the journal, see `engine.host_apply`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from weightsync.engine import PauseSpec
from weightsync.errors import Reason, WeightSyncError

_SHOWN = 5


class ApplyOrder(enum.StrEnum):
    #: All prepare, all pause, one decision, all commit.
    BARRIER = "barrier"
    #: One wave after the other, each by a decision of its own.
    ROLLING = "rolling"


class Verdict(enum.StrEnum):
    COMMIT = "COMMIT"
    ABORT = "ABORT"


class ApplyPhase(enum.StrEnum):
    #: The version lies ready, the old one is served.
    PREPARED = "prepared"
    #: Nothing is served, and will not be before the decision is known.
    READY = "ready"
    #: The version is live.
    DONE = "done"


@dataclass(frozen=True)
class FleetVersion:
    """A version as a fleet names it; two with the same digest are the same, whatever their numbers.

    The `number` may be another one in the store of another host. The `digest` is hexadecimal.
    """

    number: int = field(compare=False)
    digest: str


@dataclass(frozen=True)
class DecisionPlan:
    """One apply.

    Attributes:
        nonce: Names this plan, whoever else wrote one with the same number; of its coordinator too.
        target: What is to be live.
        previous: What is live if it is aborted; None: whatever each participant has.
        waves: The participants, one wave after the other; a barrier has one.
        decisions: How many COMMITs it takes: one a wave, and one more of a rolling apply, by which
            its last wave is judged.
        rejects: Content digest of a version that nobody may apply after the COMMIT; "": none.
        key: Idempotency key of the call that wanted it; "": it had none.
        pause: How members pause; None: as where nobody chooses. Those that go back, or come late,
            always pause so.
        reason: For people; "": nobody said.
        clears: The target's content is accepted again after the COMMIT, if it was rejected.
        traceparent: The span below which participants trace what they do; "": nobody traces it.
        gate: How participants score the target, in words of theirs; "": as where nobody chooses.
    """

    number: int
    nonce: str
    order: ApplyOrder
    target: FleetVersion
    previous: FleetVersion | None
    waves: tuple[tuple[str, ...], ...]
    decisions: int
    rejects: str = ""
    key: str = ""
    pause: PauseSpec | None = None
    reason: str = ""
    clears: bool = False
    traceparent: str = ""
    gate: str = ""

    @property
    def canaries(self) -> frozenset[str]:
        """Who scores the target for all others: the first wave, of a barrier the first by name."""
        first = self.waves[0] if self.waves else ()
        return frozenset(first if self.order is ApplyOrder.ROLLING else sorted(first)[:1])

    @property
    def members(self) -> frozenset[str]:
        return frozenset(name for wave in self.waves for name in wave)

    def wave_of(self, member: str) -> int:
        """Return the number of the decision that lets a member commit; 0: none does."""
        return next((k for k, wave in enumerate(self.waves, 1) if member in wave), 0)


def divide(
    members: Iterable[str], order: ApplyOrder, max_unavailable: int
) -> tuple[tuple[str, ...], ...]:
    """Return members in waves, sorted: all at once, or so many at a time."""
    names = sorted(members)
    size = max(1, len(names)) if order is ApplyOrder.BARRIER else max_unavailable
    if size < 1:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"max_unavailable must be 1 or more, not {size}: no member could change its version",
        )
    return tuple(tuple(names[at : at + size]) for at in range(0, len(names), size))


@dataclass(frozen=True)
class ParticipantReport:
    """Whether one phase has come to its end; if not, `reason` is one sentence that says why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Reports:
    """What participants have said of one apply, by phase and name."""

    by_phase: Mapping[ApplyPhase, Mapping[str, ParticipantReport]] = field(default_factory=dict)

    def of(self, phase: ApplyPhase) -> Mapping[str, ParticipantReport]:
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
class DecisionState:
    """How far an apply has come that is not decided.

    Attributes:
        reports: What participants have said; read after the decisions, as `present` is.
        present: Who is there, whether it takes part or not.
        step: Number of the next decision.
        paused: A barrier's participants have the word to pause.
        gone: Who is not there, and was not for some time: nobody waits for it.
        late: The time of the apply is over.
    """

    reports: Reports
    present: frozenset[str]
    step: int = 1
    paused: bool = False
    gone: frozenset[str] = frozenset()
    late: bool = False


@dataclass(frozen=True)
class KeepWaiting:
    """Nothing brings it on now."""


@dataclass(frozen=True)
class OrderPause:
    """Let a barrier's participants pause."""


@dataclass(frozen=True)
class Decide:
    step: int
    verdict: Verdict
    reason: str = ""


Order = KeepWaiting | OrderPause | Decide


def next_step(plan: DecisionPlan, state: DecisionState) -> Order:
    step, reports = state.step, state.reports
    if refusal := reports.refusal:
        return Decide(step, Verdict.ABORT, refusal)
    waiting = _waiting(plan, state)
    barrier = plan.order is ApplyOrder.BARRIER
    if not waiting and barrier and (strangers := state.present - plan.members):
        return Decide(step, Verdict.ABORT, f"{_names(strangers)} appeared meanwhile; apply again")
    if waiting is None:
        return OrderPause()
    if not waiting:
        return Decide(step, Verdict.COMMIT)
    if lost := state.gone.intersection(waiting):
        why = "no longer in the fleet's register; apply again, without it unless its server is back"
        return Decide(step, Verdict.ABORT, f"{_names(lost)} is {why}")
    if state.late:
        return Decide(step, Verdict.ABORT, f"{_names(waiting)} did not answer in time")
    return KeepWaiting()


def _waiting(plan: DecisionPlan, state: DecisionState) -> list[str] | None:
    """Return for whom the next decision waits; None: it waits for the word to pause."""
    step, reports = state.step, state.reports
    if plan.order is ApplyOrder.BARRIER:
        if lacking := reports.lacking(ApplyPhase.PREPARED, plan.members):
            return lacking
        return reports.lacking(ApplyPhase.READY, plan.members) if state.paused else None
    before = reports.lacking(ApplyPhase.DONE, plan.waves[step - 2]) if step > 1 else []
    if before or step > len(plan.waves):
        return before
    return reports.lacking(ApplyPhase.PREPARED, plan.waves[step - 1])


def _names(members: Iterable[str]) -> str:
    names = sorted(members)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
