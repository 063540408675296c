"""Changes of versions, handed to every watcher through a bounded queue of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from weightsync.v1 import weightsync_pb2 as pb

__all__ = ["ChangeFeed", "VersionEvent"]

_QUEUE = 1024


@dataclass(frozen=True, slots=True)
class VersionEvent:
    """A version as it was after one change.

    Attributes:
        info: The version, not changed any more.
        revision: Rises with every change of this server's life.
        deleted: The version is gone.
        initial: Tells the state at the beginning of a watch.
    """

    info: pb.VersionInfo
    revision: int
    deleted: bool = False
    initial: bool = False


class ChangeFeed:
    """Hands each change to all watchers without waiting for any of them."""

    def __init__(self) -> None:
        self.revision = 0
        self._closed = False
        self._queues: set[asyncio.Queue[VersionEvent | None]] = set()

    def emit(self, info: pb.VersionInfo, *, deleted: bool = False) -> None:
        """Tell every watcher; one that is too slow to keep `_QUEUE` changes is dropped."""
        self.revision += 1
        change = VersionEvent(info, self.revision, deleted)
        for queue in list(self._queues):
            try:
                queue.put_nowait(change)
            except asyncio.QueueFull:
                self._queues.discard(queue)

    def close(self) -> None:
        """End every watch after what it has queued, and later ones after the present state."""
        self._closed = True
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)
        self._queues.clear()

    async def watch(self, present: Iterable[pb.VersionInfo]) -> AsyncIterator[VersionEvent]:
        """Yield `present`, then each change until the caller stops or the feed is closed.

        Raises:
            WeightSyncError: LIMIT_EXCEEDED when the caller is too slow.
        """
        queue: asyncio.Queue[VersionEvent | None] = asyncio.Queue(_QUEUE)
        if not self._closed:
            self._queues.add(queue)
        try:
            for change in [VersionEvent(info, self.revision, initial=True) for info in present]:
                yield change
            while True:
                if queue.empty() and queue not in self._queues:
                    if self._closed:
                        return
                    raise WeightSyncError(
                        Reason.LIMIT_EXCEEDED,
                        f"the watcher fell {_QUEUE} changes behind; call WatchVersions again",
                    )
                next_change = await queue.get()
                if next_change is None:
                    return
                yield next_change
        finally:
            self._queues.discard(queue)
