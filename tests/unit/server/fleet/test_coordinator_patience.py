"""When a coordinator waits no more: for a wave, for those that stand still, for who is gone."""

from __future__ import annotations

import pytest

from tests.support.fleet_hosts import version
from weightsync import clock
from weightsync_server.decide import ApplyOrder, DecisionPlan, Verdict
from weightsync_server.fleet.coordinator import CoordinatorTimeouts
from weightsync_server.fleet.fleet_history import Apply
from weightsync_server.fleet.fleet_settings import FleetLimits

_LIMITS = FleetLimits(undecided_s=30.0, grace_s=5.0, prepare_s=600.0)
_PLAN = DecisionPlan(1, "n", ApplyOrder.ROLLING, version(2), version(1), (("a",), ("b",)), 3)


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(clock, "monotonic", made)
    return made


def test_each_wave_has_its_time(time: _Clock) -> None:
    patience = CoordinatorTimeouts(_LIMITS)
    first = Apply(_PLAN, False, ())
    second = Apply(_PLAN, False, (Verdict.COMMIT,))
    time.now += 599
    assert not patience.is_over(first)
    time.now += 1
    assert patience.is_over(first)
    assert not patience.is_over(second)
    time.now += 600
    assert patience.is_over(second)


def test_those_that_stand_still_are_let_go_before_they_fence_themselves(time: _Clock) -> None:
    patience = CoordinatorTimeouts(_LIMITS)
    paused = Apply(_PLAN, True, ())
    assert not patience.is_over(paused)
    time.now += 14.9
    assert not patience.is_over(paused)
    time.now += 0.1
    assert patience.is_over(paused)


def test_one_is_gone_that_is_missed_for_the_time_of_grace(time: _Clock) -> None:
    patience = CoordinatorTimeouts(_LIMITS)
    assert not patience.gone(["a", "b"], ["b", "other"])
    time.now += 4.9
    assert not patience.gone(["a", "b"], ["b"])
    time.now += 0.1
    assert patience.gone(["a", "b"], ["b"]) == {"a"}


def test_one_that_is_back_is_missed_anew(time: _Clock) -> None:
    patience = CoordinatorTimeouts(_LIMITS)
    patience.gone(["a"], [])
    time.now += 4
    patience.gone(["a"], ["a"])
    patience.gone(["a"], [])
    time.now += 4
    assert not patience.gone(["a"], [])


def test_nobody_is_gone_by_a_register_that_does_not_answer(time: _Clock) -> None:
    patience = CoordinatorTimeouts(_LIMITS)
    patience.gone(["a"], [])
    time.now += 60
    patience.forget()
    assert not patience.gone(["a"], [])
