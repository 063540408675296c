"""Waits grow up to their most, and what is looked for is waited for no longer than it takes."""

from __future__ import annotations

import time

import pytest

from weightsync.backoff import backoff_s, until


@pytest.mark.parametrize(
    ("factor", "waits"),
    [(2.0, [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]), (1.5, [0.5, 0.75, 1.125, 1.6875, 2.53125, 3.796875])],
)
def test_waits_grow_up_to_the_most(factor: float, waits: list[float]) -> None:
    assert [backoff_s(failures, 0.5, 5.0, factor) for failures in range(1, 7)] == waits


def test_the_first_wait_is_no_longer_than_the_most() -> None:
    assert backoff_s(1, 10.0, 5.0) == 5.0


@pytest.mark.parametrize("factor", [1.2, 2.0])
def test_no_count_of_failures_is_too_large(factor: float) -> None:
    assert backoff_s(100_000, 0.005, 60.0, factor) == 60.0


def test_chance_has_its_part_of_a_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({backoff_s(3, 1.0, 60.0, jitter=0.9) for _ in range(1000)}) > 900
    monkeypatch.setattr("random.uniform", min)
    assert backoff_s(3, 1.0, 60.0, jitter=0.25) == 3.0
    monkeypatch.setattr("random.uniform", max)
    assert backoff_s(3, 1.0, 60.0, jitter=0.25) == 4.0


async def test_what_is_so_is_not_waited_for() -> None:
    begun = time.monotonic()
    assert await until(lambda: "there", 3600.0, 0.0) == "there"
    assert time.monotonic() - begun < 60


async def test_it_is_looked_at_until_it_is_so() -> None:
    answers = iter(["", "", "there", "gone"])
    assert await until(lambda: next(answers), 0.001) == "there"
    assert next(answers) == "gone"


async def test_when_time_is_over_the_last_look_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[float] = []

    def look() -> bool:
        looks.append(100.0 + 4.0 * len(looks))
        return False

    # Each look takes four seconds.
    monkeypatch.setattr("weightsync.clock.monotonic", lambda: 100.0 + 4.0 * len(looks))
    assert await until(look, 0.001, 10.0) is False
    assert looks == [100.0, 104.0, 108.0]


async def test_without_time_it_is_looked_at_once() -> None:
    answers = iter([0, 1])
    assert await until(lambda: next(answers), 3600.0, 0.0) == 0
    assert next(answers) == 1
