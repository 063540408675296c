"""The promises of a fleet-wide apply hold in every order of steps; `decision_model` says which."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support import decision_model
from tests.support.decision_model import ANCIENT, COMMIT, NAMES, NEW, OLD, Member, Model, explore
from weightsync_server import decide
from weightsync_server.decide import ApplyOrder, Decide
from weightsync_server.fleet import member_steps
from weightsync_server.fleet.member_steps import Abort, Commit, Fence, HostMode, MemberState, Resume

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark import ParameterSet

    from tests.support.decision_model import World
    from weightsync_server.decide import (
        DecisionPlan,
        DecisionState,
        FleetVersion,
        Order,
    )
    from weightsync_server.fleet.fleet_history import History
    from weightsync_server.fleet.member_steps import Step


def _widest(*budget: object) -> ParameterSet:
    """Return one whose thousands of orders CI leaves to the battery."""
    return pytest.param(*budget, marks=pytest.mark.battery)


#: How many may crash, come back, be lost, fail and be taken to be gone.
BUDGETS = [
    (ApplyOrder.BARRIER, NAMES, (1, 1, 0, 0, 0)),
    (ApplyOrder.BARRIER, NAMES, (0, 0, 0, 1, 1)),
    _widest(ApplyOrder.BARRIER, NAMES, (0, 0, 1, 0, 1)),
    _widest(ApplyOrder.BARRIER, NAMES[:2], (1, 1, 1, 1, 1)),
    _widest(ApplyOrder.ROLLING, NAMES[:2], (1, 1, 1, 1, 1)),
    (ApplyOrder.ROLLING, NAMES, (1, 1, 0, 0, 0)),
    (ApplyOrder.ROLLING, NAMES, (0, 0, 0, 1, 0)),
]


@pytest.mark.parametrize(("kind", "names", "budget"), BUDGETS)
def test_every_order_of_steps_keeps_the_promises(
    kind: ApplyOrder, names: tuple[str, ...], budget: tuple[int, int, int, int, int]
) -> None:
    assert explore(Model(kind, names), budget) > 500


@pytest.mark.parametrize("holds", [OLD, ANCIENT])
def test_one_that_appears_meanwhile_serves_nothing_that_was_left(holds: FleetVersion) -> None:
    assert explore(Model(ApplyOrder.BARRIER, NAMES[:2], joins=holds), (0, 0, 1, 0, 1)) > 500


def test_the_model_finds_one_that_appears_and_serves_what_is_decided_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_steps, "_runs_a_barrier", lambda _: False)
    with pytest.raises(AssertionError, match="serve"):
        explore(Model(ApplyOrder.BARRIER, NAMES[:2], joins=ANCIENT), (0, 0, 1, 0, 1))


def test_the_model_finds_a_coordinator_that_overlooks_who_appeared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(plan: DecisionPlan, state: DecisionState) -> Order:
        return decide.next_step(plan, replace(state, present=plan.members))

    monkeypatch.setattr(decision_model, "next_order", blind)
    with pytest.raises(AssertionError, match="new serves"):
        explore(Model(ApplyOrder.BARRIER, NAMES[:2], joins=OLD), (0, 0, 1, 0, 1))


def test_the_model_finds_one_that_reads_before_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Model.live

    def hasty(model: Model, world: World, at: int, member: Member) -> Iterator[World]:
        yield from live(model, world, at, member)
        if not member.announced:
            yield world.with_member(at, replace(member, view=world.view))
            yield from model.act(world, at, member)

    monkeypatch.setattr(Model, "live", hasty)
    with pytest.raises(AssertionError, match="serve"):
        explore(Model(ApplyOrder.BARRIER, NAMES[:2], joins=OLD), (0, 0, 1, 0, 1))


def _find(kind: ApplyOrder) -> None:
    explore(Model(kind, NAMES[:2]), (1, 1, 0, 0, 1))


def test_the_model_finds_a_member_that_resumes_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    def resuming(state: MemberState, history: History | None) -> Step:
        step = member_steps.next_step(state, history)
        return Resume() if isinstance(step, Fence) else step

    monkeypatch.setattr(decision_model, "next_step", resuming)
    with pytest.raises(AssertionError, match="serve"):
        _find(ApplyOrder.BARRIER)


def test_the_model_finds_a_member_that_serves_after_its_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forgetting(model: Model, member: Member) -> Member:
        state = replace(member.state, mode=HostMode.SERVING, prepared=None, undecided=False)
        return replace(member, state=state, alive=True, view=None, serving=True)

    monkeypatch.setattr(Model, "restarted", forgetting)
    with pytest.raises(AssertionError, match="serve"):
        _find(ApplyOrder.BARRIER)


def test_the_model_finds_a_coordinator_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(_: DecisionPlan, state: DecisionState) -> Order:
        return Decide(state.step, COMMIT)

    monkeypatch.setattr(decision_model, "next_order", hasty)
    with pytest.raises(AssertionError, match="has not said ready"):
        _find(ApplyOrder.BARRIER)


@pytest.mark.parametrize("kind", ApplyOrder)
def test_the_model_finds_a_member_that_commits_what_is_prepared(
    monkeypatch: pytest.MonkeyPatch, kind: ApplyOrder
) -> None:
    def hasty(state: MemberState, history: History | None) -> Step:
        step = member_steps.next_step(state, history)
        return Commit(NEW) if state.prepared is not None else step

    monkeypatch.setattr(decision_model, "next_step", hasty)
    with pytest.raises(AssertionError, match="committed undecided"):
        _find(kind)


def test_the_model_finds_members_that_wait_for_a_dead_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def patient(state: MemberState, history: History | None) -> Step:
        step = member_steps.next_step(replace(state, alone=False), history)
        return member_steps.Wait() if isinstance(step, Abort) else step

    monkeypatch.setattr(decision_model, "next_step", patient)
    with pytest.raises(AssertionError, match="it ends undecided"):
        _find(ApplyOrder.BARRIER)
