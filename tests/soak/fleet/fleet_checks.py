"""What a fleet must never have done, as functions of what was seen of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.soak.fleet.fleet_record import COMMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.soak.fleet.fleet_record import FleetRecord, SeenApply, Served

__all__ = ["Findings", "Patience", "judge"]


@dataclass(frozen=True)
class Patience:
    """How long a member may serve what was left, seconds from the decision.

    Its engine is fenced in time also when its server is dead or stands still.

    Attributes:
        barrier_s: After a barrier that it was no member of: nobody of it ever may.
        rolling_s: After a rolling apply.
        unlimited: Members that go on for as long as they do not know; they begin nothing.
    """

    barrier_s: float
    rolling_s: float
    unlimited: frozenset[str] = frozenset()


@dataclass
class Findings:
    """What was wrong, one sentence each.

    Attributes:
        undecided_served: A member served an older version than decided for too long.
        mixed_fleet_after_barrier: A member of a barrier served another version than decided.
        violations: A version was served that nobody had decided on yet.
        begun: A member began to serve what a barrier had left.
    """

    undecided_served: list[str] = field(default_factory=list)
    mixed_fleet_after_barrier: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Leave:
    """A member may serve a content in this time.

    Attributes:
        since: Not before.
        until: Not after.
        why: What ended it.
        barrier: Whether that was a barrier of which it was a member.
    """

    since: float
    until: float
    why: str
    barrier: bool


def judge(record: FleetRecord, patience: Patience) -> Findings:
    """Return what was wrong."""
    found = Findings()
    applies = [record.applies[number] for number in sorted(record.applies)]
    for run in record.served:
        leaves = [
            _leave(run, since, number, applies, patience)
            for since, number in _granted(run, record.first, applies)
        ]
        _judge_run(run, leaves, found)
        _judge_start(run, leaves, applies, found)
    return found


def _granted(run: Served, first: str, applies: Iterable[SeenApply]) -> Iterator[tuple[float, int]]:
    """Yield from when on the fleet lets a member serve its content, and by which apply."""
    if run.content == first:
        yield -math.inf, 0
    for apply in applies:
        if apply.target != run.content:
            continue
        steps = {apply.needed} if apply.kind == "barrier" else {apply.needed, _step(apply, run)}
        for number, decision in enumerate(apply.decisions, 1):
            if decision.verdict == COMMIT and number in steps:
                yield decision.after, apply.number


def _step(apply: SeenApply, run: Served) -> int:
    return apply.wave_of(run.member) or apply.needed


def _leave(
    run: Served,
    since: float,
    number: int,
    applies: Sequence[SeenApply],
    patience: Patience,
) -> _Leave:
    """Return for how long what an apply has granted lasts: until a later COMMIT to another."""
    ends = [_Leave(since, math.inf, "", barrier=False)]
    for apply in applies:
        if apply.number <= number or apply.outcome != COMMIT or apply.target == run.content:
            continue
        by, why = apply.decisions[-1].by, f"{apply.kind} apply {apply.number}"
        if apply.kind == "barrier" and run.member in apply.members:
            ends.append(_Leave(since, by, why, barrier=True))
            continue
        limit_s = patience.barrier_s if apply.kind == "barrier" else patience.rolling_s
        limit_s = math.inf if run.member in patience.unlimited else limit_s
        ends.append(_Leave(since, by + limit_s, why, barrier=False))
    return min(ends, key=lambda one: one.until)


def _judge_run(run: Served, leaves: list[_Leave], found: Findings) -> None:
    # Of one answer it is known that it was true at some time between its question and itself.
    at, end = min(run.begun, run.ended), max(run.begun, run.ended)
    if run.begun > run.ended and any(one.since <= end and one.until >= at for one in leaves):
        return
    for leave in sorted(leaves, key=lambda one: one.since):
        if leave.since > at:
            _note(run, leaves, at, min(end, leave.since), found)
            at = leave.since
        if at > end:
            return
        at = max(at, leave.until)
        if at >= end:
            return
    _note(run, leaves, at, end, found)


def _judge_start(
    run: Served, leaves: list[_Leave], applies: Sequence[SeenApply], found: Findings
) -> None:
    """See that a member begins nothing that a barrier has left, in whatever it stood still.

    Nor what a barrier is about to leave of which it is no member.
    """
    barriers = [
        one
        for one in applies
        if one.kind == "barrier" and one.outcome == COMMIT and one.target != run.content
    ]
    for barrier in barriers:
        by = barrier.decisions[-1].by
        joins = run.member not in barrier.members and run.since > barrier.planned
        granted = any(leave.since > barrier.decisions[-1].after for leave in leaves)
        if (run.since > by or joins) and run.begun > run.since and not granted:
            found.begun.append(
                f"{run.member} began to serve {run.content[-8:]} after {run.since:.2f}, which "
                f"barrier {barrier.number} left at {by:.2f}"
            )
            return


def _note(run: Served, leaves: list[_Leave], at: float, end: float, found: Findings) -> None:
    what = f"{run.member} served {run.content[-8:]} for {end - at:.2f} s from {at:.2f} on"
    over = [one for one in leaves if one.until <= at]
    if not over:
        found.violations.append(f"{what}, before it was decided")
        return
    last = max(over, key=lambda one: one.until)
    if last.barrier:
        found.mixed_fleet_after_barrier.append(f"{what}, after {last.why}")
    else:
        found.undecided_served.append(f"{what}, too long after {last.why}")
