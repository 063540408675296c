"""The time for which an engine may serve, by a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clocks import Clocks
from weightsync.engine.leases import ServeLimit


class Ends:
    """Counts how often the time was over."""

    def __init__(self) -> None:
        self.count = 0
        self.limit = ServeLimit(self)

    def __call__(self) -> None:
        self.count += 1

    def over(self) -> bool:
        return self.limit.over


async def test_each_word_moves_the_limit_and_the_wall_clock_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks, ends = Clocks.over(monkeypatch), Ends()
    assert not ends.over()
    for _ in range(3):
        ends.limit.move(60)
        clocks.monotonic += 59
        clocks.wall += 86_400
        assert not ends.over()
    # Sooner, too.
    ends.limit.move(5)
    clocks.monotonic += 5
    assert ends.over()
    ends.limit.drop()
    assert not ends.over()
    await asyncio.sleep(0)
    assert ends.count == 0


async def test_it_runs_out_while_the_host_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, ends = Clocks.over(monkeypatch), Ends()
    ends.limit.move(60)
    ends.limit.check()
    assert ends.count == 0
    # The timer of the loop stands still meanwhile.
    clocks.suspended += 60
    assert ends.over()
    for _ in range(2):
        ends.limit.check()
        assert ends.count == 1
    ends.limit.move(60)
    assert (ends.count, ends.over()) == (1, False)
    ends.limit.drop()


async def test_time_that_ran_out_unnoticed_is_over_before_more_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks, ends = Clocks.over(monkeypatch), Ends()
    for more in (60, None):
        ends.limit.move(60)
        clocks.monotonic += 60
        # As in a process that stood still: the timer of the loop has not fired.
        before = ends.count
        ends.limit.move(more)
        assert ends.count == before + 1
        assert not ends.over()
        # Once: what is known to be over is given time again.
        ends.limit.move(60)
        assert ends.count == before + 1
        ends.limit.drop()


@pytest.mark.parametrize("seconds", [0.02, 0.0, -3.0])
async def test_it_stays_over_until_it_is_moved(seconds: float) -> None:
    ends = Ends()
    ends.limit.move(seconds)
    await asyncio.sleep(0.05)
    assert (ends.count, ends.over()) == (1, True)
    await asyncio.sleep(0.05)
    assert (ends.count, ends.over()) == (1, True)
    ends.limit.move(60)
    assert (ends.count, ends.over()) == (1, False)
    ends.limit.move(None)
    await asyncio.sleep(0.05)
    assert (ends.count, ends.over()) == (1, False)
