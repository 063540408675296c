"""What a member does next where it is behind, or does not know yet what its host does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    DecisionPlan,
    FleetVersion,
    ParticipantReport,
    Verdict,
)
from weightsync_server.fleet.fleet_history import Apply, History
from weightsync_server.fleet.member_steps import (
    Abort,
    Commit,
    Fence,
    HostMode,
    MemberState,
    Prepare,
    ReportPhase,
    Resume,
    Wait,
    next_step,
)


def _version(number: int) -> FleetVersion:
    return FleetVersion(number, f"{number:032x}")


def _apply(number: int, kind: ApplyOrder, *, committed: bool) -> Apply:
    """Return an apply of the version above its number, from the one with its number."""
    plan = DecisionPlan(
        number, f"n{number}", kind, _version(number + 1), _version(number), (("m",),), 1
    )
    return Apply(plan, decisions=(Verdict.COMMIT,) if committed else ())


_SERVES_OLD = MemberState("m", _version(1))


def test_one_that_is_behind_a_barrier_is_fenced_also_during_the_next_apply() -> None:
    applies = (
        _apply(1, ApplyOrder.BARRIER, committed=True),
        _apply(2, ApplyOrder.ROLLING, committed=False),
    )
    for known in (applies[:1], applies):
        assert isinstance(next_step(_SERVES_OLD, History(known)), Fence)
    fenced = replace(_SERVES_OLD, mode=HostMode.FENCED)
    # It goes there first, and to the next one from there.
    assert next_step(fenced, History(applies)) == Prepare(_version(2))
    ready = replace(fenced, prepared=Prepare(_version(2)))
    assert next_step(ready, History(applies)) == Commit(_version(2))
    failed = replace(fenced, failed=_version(2))
    assert next_step(failed, History(applies)) == Prepare(_version(3))
    # And what fails there as well is told, and not tried by turns.
    both = next_step(replace(fenced, failed=_version(3), why="no"), History(applies))
    report = ParticipantReport(ok=False, reason="no")
    assert both == ReportPhase(2, ApplyPhase.PREPARED, report, "n2")


def test_one_whose_coordinator_is_gone_decides_against_the_apply() -> None:
    apply = _apply(1, ApplyOrder.BARRIER, committed=False)
    step = next_step(replace(_SERVES_OLD, alone=True), History((apply,)))
    assert step == Abort(1, 1, "its coordinator has exited", "n1")


def test_one_that_is_not_behind_takes_part() -> None:
    applies = (
        _apply(1, ApplyOrder.ROLLING, committed=True),
        _apply(2, ApplyOrder.ROLLING, committed=False),
    )
    assert next_step(_SERVES_OLD, History(applies), max_skew=1) == Prepare(_version(3))
    assert isinstance(next_step(_SERVES_OLD, History(applies), max_skew=0), Fence)


def test_what_generates_since_before_a_start_is_fenced_when_nothing_can_be_read() -> None:
    begun = MemberState("m", None, HostMode.FENCED, unasked=True)
    assert next_step(begun, None) == Wait()
    assert isinstance(next_step(replace(begun, stale=True), None), Fence)
    assert next_step(replace(begun, stale=True, unasked=False), None) == Wait()


def test_one_that_serves_what_is_decided_is_not_behind_a_commit_that_it_cannot_read() -> None:
    applies = (
        _apply(1, ApplyOrder.BARRIER, committed=True),
        # Version 3 came by apply 2, which cannot be read.
        _apply(3, ApplyOrder.ROLLING, committed=False),
    )
    history = History(applies, hidden=(2,))
    assert next_step(MemberState("m", _version(3)), history) == Prepare(_version(4))
    assert isinstance(next_step(MemberState("m", _version(2)), history), Fence)


@pytest.mark.parametrize("running", [False, True])
def test_what_generates_since_before_a_start_is_fenced_once_it_is_known_to_be_behind(
    running: bool,
) -> None:
    applies = (
        _apply(1, ApplyOrder.BARRIER, committed=True),
        _apply(2, ApplyOrder.ROLLING, committed=not running),
    )
    begun = replace(_SERVES_OLD, mode=HostMode.FENCED, unasked=True)
    for history in (History(applies), History(applies[:1], unreadable="x", unreadable_number=2)):
        assert isinstance(next_step(begun, history), Fence)
        # Nobody knows yet what its engines hold.
        assert not isinstance(next_step(replace(begun, live=None), history), Fence)


def test_what_was_decided_against_is_not_served_beside_a_plan_that_cannot_be_read() -> None:
    plan = DecisionPlan(2, "n", ApplyOrder.ROLLING, _version(3), _version(2), (("m",), ("n",)), 3)
    applies = (
        _apply(1, ApplyOrder.ROLLING, committed=True),
        Apply(plan, decisions=(Verdict.COMMIT, Verdict.ABORT)),
    )
    history = History(applies, unreadable="x", unreadable_number=3)
    for state in (
        MemberState("m", _version(3)),
        MemberState("m", _version(3), HostMode.FENCED, unasked=True),
    ):
        assert next_step(state, history) == Fence("x")
        assert not isinstance(next_step(replace(state, live=_version(2)), history), Fence)
    # It goes back where nothing keeps it from that.
    assert next_step(MemberState("m", _version(3)), History(applies)) == Prepare(_version(2))


def test_a_displaced_one_stops_what_generates_since_before_its_start() -> None:
    begun = MemberState("m", None, HostMode.FENCED, unasked=True, displaced=True)
    assert isinstance(next_step(begun, None), Fence)
    assert next_step(replace(begun, unasked=False), None) == Wait()


def test_one_that_holds_what_is_not_decided_yet_does_not_serve_it() -> None:
    back = DecisionPlan(3, "n", ApplyOrder.ROLLING, _version(1), _version(2), (("a",), ("m",)), 3)
    applies = (
        _apply(1, ApplyOrder.ROLLING, committed=True),
        Apply(back, decisions=(Verdict.COMMIT,)),
    )
    said = frozenset({(3, ApplyPhase.PREPARED)})
    state = replace(_SERVES_OLD, mode=HostMode.FENCED, said=said)
    assert next_step(state, History(applies)) == Prepare(_version(2))
    assert next_step(replace(state, failed=_version(2)), History(applies)) == Wait()
    both = Apply(back, decisions=(Verdict.COMMIT, Verdict.COMMIT))
    assert next_step(state, History((applies[0], both))) == Resume()
    # What was decided before the apply may be served until it ends.
    state = replace(state, live=_version(2), prepared=Prepare(_version(1)))
    assert next_step(state, History(applies)) == Resume()


@pytest.mark.parametrize("kind", ApplyOrder)
def test_one_whose_server_was_restarted_serves_until_its_turn_comes(kind: ApplyOrder) -> None:
    apply = _apply(1, kind, committed=False)
    begun = replace(_SERVES_OLD, mode=HostMode.FENCED, unasked=True)
    assert next_step(begun, History((apply,))) == Resume()
    # It goes on to get ready beside that.
    assert next_step(_SERVES_OLD, History((apply,))) == Prepare(_version(2))
    if kind is ApplyOrder.BARRIER:
        # Not once it has said, or may have to say, that it stands still.
        assert next_step(begun, History((replace(apply, pause=True),))) == Prepare(_version(2))
        ready = replace(begun, said=frozenset({(1, ApplyPhase.READY)}))
        assert next_step(ready, History((apply,))) == Prepare(_version(2))
    # Nor what was not decided.
    first = _version(2 if kind is ApplyOrder.BARRIER else 1)
    assert next_step(replace(begun, live=_version(7)), History((apply,))) == Prepare(first)


@pytest.mark.parametrize("again", [3, 4], ids=["the same", "another"])
def test_what_was_decided_against_is_left_before_the_next_apply(again: int) -> None:
    def plan(number: int, target: int) -> DecisionPlan:
        versions = _version(target), _version(number if number < 3 else 2)
        return DecisionPlan(number, "n", ApplyOrder.ROLLING, *versions, (("a",), ("m",)), 3)

    committed = Apply(plan(1, 2), decisions=(Verdict.COMMIT,) * 3)
    aborted = Apply(plan(2, 3), decisions=(Verdict.COMMIT, Verdict.COMMIT, Verdict.ABORT))
    running = Apply(plan(3, again))
    history = History((committed, aborted, running))
    state = MemberState("m", _version(3), said=frozenset({(3, ApplyPhase.PREPARED)}))
    assert next_step(state, history) == Prepare(_version(2))
    ready = replace(state, prepared=Prepare(_version(2)))
    assert next_step(ready, history) == Commit(_version(2))
    # Until it is decided that it goes on.
    decided = replace(running, decisions=(Verdict.COMMIT,) * 2)
    done = {(3, ApplyPhase.PREPARED), (3, ApplyPhase.DONE)}
    gone_on = replace(state, said=frozenset(done))
    expected = Wait() if again == 3 else Prepare(_version(4))
    assert next_step(gone_on, History((committed, aborted, decided))) == expected


def test_what_a_barrier_has_left_is_not_served_because_it_is_to_come_again() -> None:
    back = DecisionPlan(3, "n", ApplyOrder.ROLLING, _version(1), _version(3), (("m",),), 2)
    applies = tuple(_apply(number, ApplyOrder.BARRIER, committed=True) for number in (1, 2))
    history = History((*applies, Apply(back)))
    step = next_step(_SERVES_OLD, history)
    assert step == Fence("version 3 was decided; this host applies it first")


def test_one_that_is_behind_during_a_barrier_is_told_that_it_waits_for_that() -> None:
    applies = (
        _apply(1, ApplyOrder.BARRIER, committed=True),
        _apply(2, ApplyOrder.BARRIER, committed=False),
    )
    step = next_step(_SERVES_OLD, History(applies))
    assert isinstance(step, Fence)
    assert "serves nothing until the running barrier is decided" in step.reason
    assert next_step(replace(_SERVES_OLD, mode=HostMode.FENCED), History(applies)) == Prepare(
        _version(3)
    )


def test_a_barrier_to_what_is_live_is_prepared_and_committed_as_any() -> None:
    apply = _apply(1, ApplyOrder.BARRIER, committed=False)
    state = replace(_SERVES_OLD, live=_version(2))
    wanted = Prepare(_version(2))
    assert next_step(state, History((apply,))) == wanted
    still = replace(state, mode=HostMode.PAUSED, prepared=wanted)
    committed = replace(apply, decisions=(Verdict.COMMIT,))
    assert next_step(still, History((committed,))) == Commit(_version(2))


def test_one_that_can_write_nothing_down_is_not_ready() -> None:
    apply = _apply(1, ApplyOrder.ROLLING, committed=False)
    step = next_step(replace(_SERVES_OLD, ill="the disk is full"), History((apply,)))
    assert step == ReportPhase(
        1, ApplyPhase.PREPARED, ParticipantReport(ok=False, reason="the disk is full"), "n1"
    )
