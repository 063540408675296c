"""Tasks that wait for a fetcher, in the order in which they came."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.tasks import to_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync.shm.segments import Segment

__all__ = ["Task", "TaskQueue"]

_order = itertools.count()


class Task:
    """One piece of work on a segment.

    Args:
        op: What to do.
        segment: With what.
        size: Its first bytes, as many.
        timeout_s: Deadline of one attempt in seconds.
        fills: The fetcher writes into the segment; else it gets it to read only.
        others: Segments that it reads besides.
        source_fd: A file that it reads besides.
        again: The task may be tried again when a fetcher is lost over it.
        facts: What else the fetcher must know.

    Attributes:
        document: What the fetcher is told.
        attempts: Fetchers that were lost over it.
        result: The answer's blob.
        cancelled: Set when the caller no longer wants the result.
        running: Whether a fetcher may be at it.
    """

    def __init__(
        self,
        op: str,
        segment: Segment,
        size: int,
        timeout_s: float,
        *,
        fills: bool = False,
        others: Sequence[Segment] = (),
        source_fd: int | None = None,
        again: bool = True,
        **facts: Any,
    ) -> None:
        self.document: dict[str, Any] = {"op": op, "size": size, "fills": fills, **facts}
        self.document["segments"] = [(s.id, s.capacity) for s in (segment, *others)]
        self.again = again
        self.timeout_s = timeout_s
        self.attempts = 0
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.cancelled = asyncio.Event()
        self.running = False
        self._segment = segment
        self._fills = fills
        self._others = others
        self._source_fd = source_fd
        self._order = next(_order)

    def __lt__(self, other: Task) -> bool:
        """Earlier tasks come first; a task that is tried again keeps its place."""
        return self._order < other._order

    @contextlib.contextmanager
    def lend_fds(self) -> Iterator[list[int]]:
        """Lend the descriptors to send: only who fills a segment gets a writable one."""
        with contextlib.ExitStack() as opened:

            def read_only(segment: Segment) -> int:
                fd = segment.read_only_fd()
                opened.callback(os.close, fd)
                return fd

            fds = [self._segment.fd if self._fills else read_only(self._segment)]
            fds += [read_only(other) for other in self._others]
            yield fds if self._source_fd is None else [*fds, self._source_fd]

    def answer(self, document: dict[str, Any], blob: bytes) -> None:
        """End the task with what the fetcher answered."""
        if self.cancelled.is_set():
            self.result.cancel()
        elif "reason" in document:
            self.fail(WeightSyncError(Reason(document["reason"]), document["error"]))
        elif not self.result.done():
            self.result.set_result(blob)

    def fail(self, error: BaseException) -> None:
        """End the task with an error, unless it has ended."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # retrieved here: its caller may be gone

    async def outcome(self) -> bytes:
        """Wait for the end of the task, also when cancelled: afterwards nobody is at it."""
        return await to_end(self.result, self._cancel)

    def _cancel(self) -> None:
        self.cancelled.set()
        if not self.running:
            self.result.cancel()


class TaskQueue(asyncio.PriorityQueue[Task]):
    """Fetchers take from it when they are free, so that work balances by its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = 0

    @property
    def backlog(self) -> int:
        """Tasks that lie here until a fetcher has done what it is at."""
        return max(0, self.qsize() - self._waiting)

    async def get(self) -> Task:
        """Return the earliest task, once there is one."""
        self._waiting += 1
        try:
            return await super().get()
        finally:
            self._waiting -= 1

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        """End every waiting task with an error."""
        while not self.empty():
            self.get_nowait().fail(error())
