"""Changes of versions, handed to every watcher through a bounded queue of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.version_events import VersionChanged

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable


_QUEUE = 1024


@dataclass(frozen=True, slots=True)
class VersionEvent:
    """A version as it was after one change; `info` does not change any more.

    `revision` rises with every change while the server lives. An `initial` event gives the state at
    the start.
    """

    info: pb.VersionInfo
    revision: int
    deleted: bool = False
    initial: bool = False


class ChangeFeed:
    def __init__(self, table: VersionTable) -> None:
        self._table = table
        self._revision = 0
        self._closed = False
        self._queues: set[asyncio.Queue[VersionEvent | None]] = set()
        table.events.on(VersionChanged, lambda event: self._emit(event.record))

    def _emit(self, record: VersionRecord) -> None:
        """Tell every watcher; one that is too slow to keep `_QUEUE` changes is dropped."""
        self._revision += 1
        gone = self._table.find(record.version) is not record
        change = VersionEvent(record.to_info(), self._revision, gone)
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

    async def watch(self) -> AsyncIterator[VersionEvent]:
        """Yield the present state of every version, oldest first, then each change.

        Ends when the feed is closed; raises LIMIT_EXCEEDED if the caller is too slow.
        """
        queue: asyncio.Queue[VersionEvent | None] = asyncio.Queue(_QUEUE)
        if not self._closed:
            self._queues.add(queue)
        try:
            present = [record.to_info() for record in reversed(self._table.list())]
            for change in [VersionEvent(info, self._revision, initial=True) for info in present]:
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
