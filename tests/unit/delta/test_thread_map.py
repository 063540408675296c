"""Work that threads take themselves: results in order, each item once, errors end it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightsync.delta.encoder import spread


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 300])
def test_every_item_is_worked_on_once_and_results_are_in_order(threads: int, count: int) -> None:
    seen: list[int] = []

    def square(item: int) -> int:
        seen.append(item)
        return item * item

    with ThreadPoolExecutor(threads) as pool:
        found = spread(pool, threads, square, range(count))
    assert found == [item * item for item in range(count)]
    assert sorted(seen) == list(range(count))


def test_threads_work_at_the_same_time() -> None:
    # Each waits for the other, which breaks after its time when there is none.
    both = threading.Barrier(2, timeout=30)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(spread(pool, 2, lambda _: both.wait(), "ab")) == [0, 1]


def test_an_error_is_raised_and_ends_the_work() -> None:
    seen: list[int] = []
    failed = threading.Event()

    def fail(item: int) -> None:
        if item == 0:
            failed.set()
            raise ValueError("item 0")
        assert failed.wait(30)
        seen.append(item)

    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="item 0"):
        spread(pool, 1, fail, range(100))
    assert seen == []


def test_nothing_runs_any_more_after_an_error() -> None:
    begun, ended = threading.Event(), threading.Event()

    def call(item: int) -> None:
        if item == 0:
            assert begun.wait(30)
            raise ValueError("item 0")
        begun.set()
        threading.Event().wait(0.2)
        ended.set()

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="item 0"):
            spread(pool, 2, call, range(2))
        assert ended.is_set()
