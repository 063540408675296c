"""Shards that come one after the other, from the thread that reads the caller's iterable."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync_client.source.shards import Shard

__all__ = ["Turns"]


class Turns:
    """Hands shards to another thread while the next one is read: two of them are in memory.

    Args:
        shards: Those that come.
        alive: Called now and then while the other thread is at work, or has nothing to do.
        every_s: How often, seconds.
    """

    def __init__(self, shards: Iterator[Shard], alive: Callable[[], None], every_s: float) -> None:
        self._shards = shards
        self._alive = alive
        self._every_s = every_s
        self._ready: queue.SimpleQueue[Shard | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(1)
        #: Read, and not with the server yet.
        self.pending: list[Shard] = []

    def read(self, stop: threading.Event) -> None:
        """Read all of them, in this thread, unless it is stopped."""
        try:
            while not stop.is_set() and (shard := next(self._shards, None)) is not None:
                self.pending.append(shard)
                while not self._free.acquire(timeout=self._every_s):
                    self._alive()
                self._ready.put(shard)
                del shard
        finally:
            self._ready.put(None)

    def next(self) -> Shard | None:
        """Return the next one; None: there is none any more."""
        while True:
            try:
                return self._ready.get(timeout=self._every_s)
            except queue.Empty:
                self._alive()

    def done(self, shard: Shard) -> None:
        """Note that the server has one."""
        self.pending.remove(shard)
        self._free.release()

    def give_up(self) -> None:
        """Have both threads go on, after which no shard is wanted any more."""
        self._free.release()
        self._ready.put(None)
