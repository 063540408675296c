"""Shards that wait for a lane or come one after the other, and signs of life meanwhile."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.source.shards import Shard
from weightsync_client.transport.messages import (
    Message,
    ShardDigester,
    heartbeat_message,
    join_message,
)

#: Silence after which a lane tells the server that the source is still at work.
_HEARTBEAT_S = 10.0


@dataclass(slots=True)
class ShardJob:
    """One shard to send, of which the server holds `offset` bytes already."""

    shard: Shard
    digester: ShardDigester
    offset: int = 0
    layout_known: bool = False

    def take_up(self, progress: pb.ShardProgress | None) -> None:
        self.layout_known = progress is not None
        # Of a shard that outlived the server more may be there than this process sends of it.
        self.offset = min(progress.received_bytes, self.shard.entry.size) if progress else 0


class Jobs(queue.SimpleQueue[ShardJob | None]):
    """The queue from the source to the lanes; None in it tells one lane that it is done."""

    def soon(self) -> ShardJob | None:
        """Return the next shard, or None at the end.

        Raises queue.Empty when the server wants a sign of life.
        """
        return self.get(timeout=_HEARTBEAT_S)

    def now(self) -> ShardJob | None:
        with contextlib.suppress(queue.Empty):
            job = self.get_nowait()
            if job is not None:
                return job
            self.put(None)
        return None

    def heartbeats(
        self, push_id: str, writer: int, found: list[ShardJob | None]
    ) -> Generator[Message, None, None]:
        """Yield the messages of a stream that stays open until there is something to `found`."""
        yield join_message(push_id, writer)
        while not found:
            yield heartbeat_message()
            with contextlib.suppress(queue.Empty):
                found.append(self.soon())


class ShardTurns:
    """Hands shards to another thread while the next one is read: two of them are in memory.

    `alive` is called every `every_s` seconds while the other thread works or waits.
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
        while True:
            try:
                return self._ready.get(timeout=self._every_s)
            except queue.Empty:
                self._alive()

    def done(self, shard: Shard) -> None:
        self.pending.remove(shard)
        self._free.release()

    def give_up(self) -> None:
        """Have both threads go on, after which no shard is wanted any more."""
        self._free.release()
        self._ready.put(None)
