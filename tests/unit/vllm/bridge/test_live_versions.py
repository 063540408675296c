"""Intervals in which versions are served, and what becomes of them."""

from __future__ import annotations

import asyncio
import gc

import pytest

from weightsync.vllm.bridge.live_versions import KeptKeys, LiveInterval, LiveVersions


def _seen(since: LiveInterval) -> list[tuple[str, int]]:
    return [(interval.label, interval.version) for interval in since.walk()]


def test_each_version_follows_the_one_before_and_repeating_one_changes_nothing() -> None:
    live = LiveVersions()
    first = live.current
    for version in (1, 1, 2, 1):
        live.begin(version)
        live.confirm()
        assert live.version == version
    assert _seen(first) == [("default", 0), ("1", 1), ("2", 2), ("1", 1)]


def test_a_newer_version_counts_when_it_is_confirmed_and_an_older_one_at_once() -> None:
    live = LiveVersions()
    for version, before in ((5, 0), (6, 5), (4, 4)):
        live.begin(version)
        assert live.version == before
        live.confirm()
        assert live.version == version
    live.begin(0)
    assert live.version == 0


def test_an_unknown_number_keeps_the_label_and_is_not_taken_for_the_one_before() -> None:
    live = LiveVersions()
    live.begin(3)
    live.confirm()
    since = live.current
    live.begin(0)
    assert _seen(since) == [("3", 3), ("3", 0)]
    assert live.version == 0


@pytest.mark.parametrize("served", [8, 7, 0])
async def test_an_attempt_counts_when_it_is_settled(served: int) -> None:
    live = LiveVersions()
    live.begin(7)
    live.confirm()
    since = live.current
    live.attempt(8)
    # A trainer's own label meanwhile.
    live.relabel("step 5")
    waiting = asyncio.ensure_future(live.settled())
    await asyncio.sleep(0)
    assert (live.version, waiting.done()) == (7, False)
    live.settle(served)
    await waiting
    live.settle(99)
    assert live.version == served
    assert _seen(since) == [("7", 7), ("8", served), ("step 5", served)]


def test_another_label_is_the_same_version() -> None:
    live = LiveVersions()
    live.begin(4)
    live.confirm()
    since = live.current
    live.relabel("4")
    live.relabel("step 9")
    assert _seen(since) == [("4", 4), ("step 9", 4)]
    assert live.version == 4


def test_what_no_request_refers_to_is_freed() -> None:
    live = LiveVersions()
    started = live.current
    for version in range(1, 1001):
        live.begin(version)
    assert len(_seen(started)) == 1001
    before = sum(type(one).__name__ == "LiveInterval" for one in gc.get_objects())
    del started
    after = sum(type(one).__name__ == "LiveInterval" for one in gc.get_objects())
    assert before - after == 1000


def _older(live: LiveVersions) -> tuple[int, ...]:
    return live.current.older


def test_versions_whose_keys_a_new_request_may_find_are_kept_until_all_are_thrown_away() -> None:
    live = LiveVersions()
    for version in range(1, 31):
        live.begin(version, KeptKeys.ALL)
    assert _older(live) == (1, *range(15, 30))
    live.begin(3, KeptKeys.ALL)
    assert _older(live) == (1, *range(16, 31))
    live.begin(31, KeptKeys.IN_FLIGHT)
    assert _older(live) == ()
    live.attempt(32)
    assert live.current.kept is KeptKeys.ALL
    assert _older(live) == (31,)
    live.settle(32)
    # Another label is no other version.
    live.relabel("step 9")
    assert _older(live) == (31,)
    live.begin(33)
    assert _older(live) == ()


def test_watchers_hear_of_a_version_when_it_is_decided() -> None:
    live = LiveVersions()
    heard: list[tuple[int, bool]] = []
    watcher = lambda: heard.append((live.current.version, live.undecided))  # noqa: E731
    live.watchers.add(watcher)
    live.begin(1)
    live.attempt(2)
    assert heard == [(1, False)]
    live.settle(1)
    assert heard == [(1, False), (1, False)]
    live.watchers.discard(watcher)
    live.begin(3)
    assert len(heard) == 2
