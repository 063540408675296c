"""What a member does next where it is behind, or does not know yet what its host does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightsync_server.fleet.fleet_history import Apply, History
from weightsync_server.fleet.fleet_plan import (
    ApplyPhase,
    FleetPlan,
    FleetVersion,
    Kind,
    MemberReport,
    Verdict,
)
from weightsync_server.fleet.member_steps import (
    Commit,
    Fence,
    MemberState,
    Mode,
    Prepare,
    Resume,
    Say,
    Wait,
    next_step,
)


def _version(number: int) -> FleetVersion:
    return FleetVersion(number, f"{number:032x}")


def _apply(number: int, kind: Kind, *, committed: bool) -> Apply:
    """Return an apply of the version above its number, from the one with its number."""
    plan = FleetPlan(
        number, f"n{number}", kind, _version(number + 1), _version(number), (("m",),), 1
    )
    return Apply(plan, decisions=(Verdict.COMMIT,) if committed else ())


_SERVES_OLD = MemberState("m", _version(1))


def test_one_that_is_behind_a_barrier_is_fenced_also_during_the_next_apply() -> None:
    applies = (
        _apply(1, Kind.BARRIER, committed=True),
        _apply(2, Kind.ROLLING, committed=False),
    )
    assert isinstance(next_step(_SERVES_OLD, History(applies)), Fence)
    fenced = replace(_SERVES_OLD, mode=Mode.FENCED)
    assert next_step(fenced, History(applies)) == Prepare(_version(3))


def test_one_that_is_not_behind_takes_part() -> None:
    applies = (
        _apply(1, Kind.ROLLING, committed=True),
        _apply(2, Kind.ROLLING, committed=False),
    )
    assert next_step(_SERVES_OLD, History(applies), max_skew=1) == Prepare(_version(3))
    assert isinstance(next_step(_SERVES_OLD, History(applies), max_skew=0), Fence)


def test_what_generates_since_before_a_start_is_fenced_when_nothing_can_be_read() -> None:
    begun = MemberState("m", None, Mode.FENCED, unasked=True)
    assert next_step(begun, None) == Wait()
    assert isinstance(next_step(replace(begun, stale=True), None), Fence)
    assert next_step(replace(begun, stale=True, unasked=False), None) == Wait()


def test_one_that_serves_what_is_decided_is_not_behind_a_commit_that_it_cannot_read() -> None:
    applies = (
        _apply(1, Kind.BARRIER, committed=True),
        # Version 3 came by apply 2, which cannot be read.
        _apply(3, Kind.ROLLING, committed=False),
    )
    history = History(applies, hidden=(2,))
    assert next_step(MemberState("m", _version(3)), history) == Prepare(_version(4))
    assert isinstance(next_step(MemberState("m", _version(2)), history), Fence)


def test_a_displaced_one_stops_what_generates_since_before_its_start() -> None:
    begun = MemberState("m", None, Mode.FENCED, unasked=True, displaced=True)
    assert isinstance(next_step(begun, None), Fence)
    assert next_step(replace(begun, unasked=False), None) == Wait()


def test_one_that_holds_what_is_not_decided_yet_does_not_serve_it() -> None:
    back = FleetPlan(3, "n", Kind.ROLLING, _version(1), _version(2), (("a",), ("m",)), 3)
    applies = (_apply(1, Kind.ROLLING, committed=True), Apply(back, decisions=(Verdict.COMMIT,)))
    said = frozenset({(3, ApplyPhase.PREPARED)})
    state = replace(_SERVES_OLD, mode=Mode.FENCED, said=said)
    assert next_step(state, History(applies)) == Wait()
    both = Apply(back, decisions=(Verdict.COMMIT, Verdict.COMMIT))
    assert next_step(state, History((applies[0], both))) == Resume()
    # What was decided before the apply may be served until it ends.
    state = replace(state, live=_version(2), prepared=Prepare(_version(1)))
    assert next_step(state, History(applies)) == Resume()


def test_one_that_holds_the_content_under_another_number_serves_it() -> None:
    applies = (_apply(1, Kind.BARRIER, committed=True),)
    other = MemberState("m", FleetVersion(9, _version(2).digest))
    assert next_step(other, History(applies)) == Say(1, ApplyPhase.DONE, MemberReport(ok=True))
    fenced = replace(other, mode=Mode.FENCED)
    assert next_step(fenced, History(applies)) == Resume()


@pytest.mark.parametrize("kind", Kind)
def test_one_whose_server_was_restarted_serves_until_its_turn_comes(kind: Kind) -> None:
    apply = _apply(1, kind, committed=False)
    begun = replace(_SERVES_OLD, mode=Mode.FENCED, unasked=True)
    assert next_step(begun, History((apply,))) == Resume()
    # It goes on to get ready beside that.
    assert next_step(_SERVES_OLD, History((apply,))) == Prepare(_version(2))
    if kind is Kind.BARRIER:
        # Not once it has said, or may have to say, that it stands still.
        assert next_step(begun, History((replace(apply, pause=True),))) == Prepare(_version(2))
        ready = replace(begun, said=frozenset({(1, ApplyPhase.READY)}))
        assert next_step(ready, History((apply,))) == Prepare(_version(2))
    # Nor what was not decided.
    assert next_step(replace(begun, live=_version(7)), History((apply,))) == Prepare(_version(2))


def test_a_barrier_to_what_is_live_is_prepared_and_committed_as_any() -> None:
    apply = _apply(1, Kind.BARRIER, committed=False)
    state = replace(_SERVES_OLD, live=_version(2))
    wanted = Prepare(_version(2))
    assert next_step(state, History((apply,))) == wanted
    still = replace(state, mode=Mode.PAUSED, prepared=wanted)
    committed = replace(apply, decisions=(Verdict.COMMIT,))
    assert next_step(still, History((committed,))) == Commit(_version(2))


def test_one_that_can_write_nothing_down_is_not_ready() -> None:
    apply = _apply(1, Kind.ROLLING, committed=False)
    step = next_step(replace(_SERVES_OLD, ill="the disk is full"), History((apply,)))
    assert step == Say(1, ApplyPhase.PREPARED, MemberReport(ok=False, reason="the disk is full"))
