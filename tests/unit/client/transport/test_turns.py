"""Shards are read in one thread and written in another, and neither waits for one that is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from weightsync_client.transport.shard_queue import ShardTurns


def shards(count: int, made: list[int], second: threading.Event | None = None) -> Iterator[Any]:
    for index in range(count):
        made.append(index)
        if second is not None and index == 1:
            second.set()
        yield SimpleNamespace(index=index)


def reading(turns: ShardTurns, stop: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=turns.read, args=(stop,))
    thread.start()
    return thread


def test_one_is_read_while_one_is_written() -> None:
    made: list[int] = []
    turns = ShardTurns(shards(5, made), lambda: None, 0.01)
    thread = reading(turns, threading.Event())
    taken = []
    while (shard := turns.next()) is not None:
        taken.append(shard.index)
        assert len(turns.pending) <= 2
        assert len(made) <= len(taken) + 1
        turns.done(shard)
    thread.join()
    assert taken == made == [0, 1, 2, 3, 4]
    assert turns.pending == []


def test_while_one_waits_there_are_signs_of_life() -> None:
    alive = threading.Event()
    turns = ShardTurns(shards(3, []), alive.set, 0.01)
    thread = reading(turns, threading.Event())
    first = turns.next()
    assert alive.wait(10)
    turns.done(first)  # type: ignore[arg-type] # there are three
    while (shard := turns.next()) is not None:
        turns.done(shard)
    thread.join()


def test_what_was_read_and_not_taken_is_left_when_it_ends_early() -> None:
    stop, second = threading.Event(), threading.Event()
    turns = ShardTurns(shards(5, [], second), lambda: None, 60)
    thread = reading(turns, stop)
    assert turns.next() is not None
    assert second.wait(10)
    stop.set()
    turns.give_up()
    thread.join(10)
    assert not thread.is_alive()
    assert [shard.index for shard in turns.pending] == [0, 1]
