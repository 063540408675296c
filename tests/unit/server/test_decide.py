"""What is decided next, in every state of a small apply: nobody goes on before all can."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    Decide,
    DecisionPlan,
    DecisionState,
    FleetVersion,
    KeepWaiting,
    OrderPause,
    ParticipantReport,
    Reports,
    Verdict,
    divide,
    next_step,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("a", "b")
PHASES = tuple(ApplyPhase)
#: Nothing was said of a phase, or that it has come to its end, or why it has not.
SAID = (None, ParticipantReport(ok=True), ParticipantReport(ok=False, reason="no room"))


def plan(order: ApplyOrder) -> DecisionPlan:
    waves = divide(NAMES, order, 1)
    decisions = len(waves) + (order is ApplyOrder.ROLLING)
    target, previous = FleetVersion(2, "new"), FleetVersion(1, "old")
    return DecisionPlan(1, "n", order, target, previous, waves, decisions)


def states(decisions: int) -> Iterator[DecisionState]:
    there = [frozenset(NAMES), frozenset((*NAMES, "new")), frozenset("a")]
    for said in itertools.product(SAID, repeat=len(NAMES) * len(PHASES)):
        reports: dict[ApplyPhase, dict[str, ParticipantReport]] = {phase: {} for phase in PHASES}
        for (phase, name), report in zip(itertools.product(PHASES, NAMES), said, strict=True):
            if report is not None:
                reports[phase][name] = report
        for present, step, paused, late in itertools.product(
            there, range(1, decisions + 1), (False, True), (False, True)
        ):
            gone = frozenset(NAMES) - present
            yield DecisionState(
                Reports(reports), present, step, paused=paused, gone=gone, late=late
            )


@pytest.mark.parametrize("order", ApplyOrder)
def test_a_refusal_is_the_end_and_says_whose(order: ApplyOrder) -> None:
    made = plan(order)
    for state in states(made.decisions):
        if state.reports.refusal:
            told = Decide(state.step, Verdict.ABORT, state.reports.refusal)
            assert next_step(made, state) == told


def test_a_barrier_goes_on_when_all_stand_still_and_nobody_else_is_there() -> None:
    made = plan(ApplyOrder.BARRIER)
    seen = set()
    for state in states(made.decisions):
        if state.reports.refusal:
            continue
        order, alone = next_step(made, state), state.present <= made.members
        prepared, ready = (
            not state.reports.lacking(phase, NAMES)
            for phase in (ApplyPhase.PREPARED, ApplyPhase.READY)
        )
        goes_on = prepared and ready and state.paused and alone
        assert (order == Decide(state.step, Verdict.COMMIT)) is goes_on
        assert isinstance(order, OrderPause) is (prepared and not state.paused and alone)
        if isinstance(order, KeepWaiting):
            assert not state.late
            reports = state.reports
            waiting = reports.lacking(ApplyPhase.PREPARED, NAMES)
            waiting = waiting or reports.lacking(ApplyPhase.READY, NAMES)
            assert not state.gone.intersection(waiting)
        seen.add(type(order))
    assert seen == {Decide, OrderPause, KeepWaiting}


def test_waves_go_on_when_the_one_before_is_done_and_the_next_prepared() -> None:
    made = plan(ApplyOrder.ROLLING)
    for state in states(made.decisions):
        if state.reports.refusal:
            continue
        step, reports, order = state.step, state.reports, next_step(made, state)
        before = made.waves[step - 2] if step > 1 else ()
        wave = made.waves[step - 1] if step <= len(made.waves) else ()
        waiting = reports.lacking(ApplyPhase.DONE, before)
        waiting = waiting or reports.lacking(ApplyPhase.PREPARED, wave)
        assert (order == Decide(step, Verdict.COMMIT)) is (not waiting)
        assert not isinstance(order, OrderPause)
        # Nobody waits beyond the time of the wave, nor for one that is gone.
        waits = bool(waiting) and not state.late and not state.gone.intersection(waiting)
        assert isinstance(order, KeepWaiting) is waits
