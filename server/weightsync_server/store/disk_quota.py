"""The room that versions may take in the store: promised in numbers before the first byte comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.os_errors import write_fault
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from weightsync_server.store.protocol import Store


#: Room is freed in less, but for a disk that hangs; more would only put the refusal off.
_WAIT_S = 10.0


class DiskQuota:
    """Counts what open pushes were promised; with the floor it never exceeds what is free.

    The last `floor_bytes` are for journal and records.
    """

    def __init__(self, store: Store, floor_bytes: int = 0, *, wait_s: float = _WAIT_S) -> None:
        self.promised = 0
        self.wait_s = wait_s
        self._store = store
        self.floor_bytes = floor_bytes
        self._lock = asyncio.Lock()
        self._freeing: set[asyncio.Future[Any]] = set()

    def share(self) -> DiskReservation:
        return DiskReservation(self, self._lock, asyncio.get_running_loop().create_future())

    def frees(self, work: asyncio.Future[Any]) -> None:
        """Take note of work that gives room back before it ends: who lacks room waits for it."""
        self._freeing.add(work)
        work.add_done_callback(self._freeing.discard)

    @property
    def freeing(self) -> set[asyncio.Future[Any]]:
        return {work for work in self._freeing if not work.done()}

    async def reserve(self, size: int) -> None:
        """Promise `size` bytes more; what is being written counts twice for a moment."""
        try:
            free = await in_thread(self._store.free_bytes)
        except OSError as error:
            raise write_fault(error, "asking for the free space of the store") from error
        left = max(0, free - self.promised - self.floor_bytes)
        if size > left:
            raise WeightSyncError(
                Reason.DISK_EXHAUSTED,
                f"{size} bytes are needed in the store, {left} are available: {free} are free, "
                f"{self.promised} promised to open pushes and {self.floor_bytes} kept free; free "
                "space in the store, delete versions, or lower disk_floor_bytes",
                metadata={
                    "needed_bytes": str(size),
                    "free_bytes": str(free),
                    "promised_bytes": str(self.promised),
                    "floor_bytes": str(self.floor_bytes),
                },
            )
        self.promised += size

    def release(self, size: int) -> None:
        self.promised -= size


class DiskReservation:
    """What one push was promised, less what it has written; `close` gives the rest back."""

    def __init__(
        self, budget: DiskQuota, lock: asyncio.Lock, ended: asyncio.Future[WeightSyncError]
    ) -> None:
        self._budget = budget
        self._lock = lock
        self._total = 0
        self._written = 0
        self._closed = False
        self._ended = ended

    def sibling(self) -> DiskReservation:
        """Return one more share of the same push, empty yet; the push fails for both."""
        return DiskReservation(self._budget, self._lock, self._ended)

    async def promise(self, total: int) -> None:
        """Make sure that `total` bytes, all of the push so far, have room.

        Waits a while for room that is being freed. When it raises, DISK_EXHAUSTED or why the push
        has failed meanwhile, what was promised before still is.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._budget.wait_s
        while True:
            # Before the store is asked: what is freed while it answers may not be in its answer.
            freeing = self._budget.freeing
            try:
                await self._promise(total)
            except WeightSyncError as error:
                left = deadline - loop.time()
                if error.reason is not Reason.DISK_EXHAUSTED or not freeing or left <= 0:
                    raise
            else:
                break
            # Without the lock: whom we wait for may be about to ask for room itself.
            either = {*freeing, self._ended}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            raise self._ended.result()

    async def _promise(self, total: int) -> None:
        async with self._lock:
            more = total - self._total
            if more <= 0 or self._ended.done():
                return
            await self._budget.reserve(more)
            if self._closed:
                # The push ended meanwhile.
                self._budget.release(more)
            else:
                self._total = total

    def covers(self, total: int) -> bool:
        return total <= self._total

    def wrote(self, size: int) -> None:
        if not self._closed:
            # A shard whose proof failed is written again.
            size = min(size, self._total - self._written)
            self._written += size
            self._budget.release(size)

    def end(self, error: WeightSyncError, closing: asyncio.Future[Any]) -> None:
        """Take note that the push failed: it waits for no room, and frees its own in `closing`."""
        if not self._ended.done():
            # Or it would wait for its own end.
            self._ended.set_result(error)
        self._budget.frees(closing)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._budget.release(self._total - self._written)
