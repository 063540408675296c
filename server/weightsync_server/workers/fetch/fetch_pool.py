"""The fetcher pool: keeps N fetcher processes alive and gives them the tasks that wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.wire.documents import refusal_of
from weightsync_server.ops.os_errors import write_fault
from weightsync_server.ops.tasks import to_end
from weightsync_server.workers.fetch.fetch_api import FetchApi
from weightsync_server.workers.runtime.child_process import ChildProcess, ChildUnsentError, Program
from weightsync_server.workers.runtime.process_pool import ProcessPool

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment


_order = itertools.count()


class Task:
    """One piece of work on the first `size` bytes of a segment.

    `timeout_s` is the deadline of one attempt. If `fills`, the fetcher writes into the segment;
    else it gets it, like `others` and `source_fd`, to read only. If `again`, the task may be tried
    again when a fetcher is lost over it; `attempts` counts these. `cancelled` is set when the
    caller no longer wants the result.
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
        if self.cancelled.is_set():
            self.result.cancel()
        elif "reason" in document:
            self.fail(refusal_of(document))
        elif not self.result.done():
            self.result.set_result(blob)

    def fail(self, error: BaseException) -> None:
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
        self._waiting += 1
        try:
            return await super().get()
        finally:
            self._waiting -= 1

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        while not self.empty():
            self.get_nowait().fail(error())


#: Fetchers that a task may cost before it is given up.
_MAX_ATTEMPTS = 3
_PROGRAM = Program("fetcher", "weightsync_server.workers.fetch.fetch_main")


class FetcherPool(ProcessPool, FetchApi):
    """Keeps `count` processes that digest, write, read and change shards.

    A task either has its whole effect or raises; once its method has returned or raised, also by
    cancellation, no fetcher touches the segment or the file for it any more. A fetcher that dies is
    replaced and its task tried again. Every method belongs to the event loop's thread.

    Each process digests one shard and reads or writes one file at a time. `ready_timeout_s` bounds
    its start and its signs of life. Any task may take `task_timeout_s`, and one second more for
    each `min_bytes_per_s` bytes.
    """

    def __init__(
        self,
        count: int,
        *,
        ready_timeout_s: float = 30.0,
        on_restart: Callable[[], None] = lambda: None,
        task_timeout_s: float = 60.0,
        min_bytes_per_s: float = 10e6,
        heartbeat_s: float = 10.0,
    ) -> None:
        if count < 1:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"fetchers must be 1 or more, not {count}"
            )
        super().__init__(_PROGRAM, count, ready_timeout_s=ready_timeout_s, heartbeat_s=heartbeat_s)
        self._on_restart = on_restart
        self._task_timeout_s = task_timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        # Apart, so that a slow disk never holds up a digest.
        self._digests = TaskQueue()
        self._files = TaskQueue()
        self._unfinished: dict[ChildProcess, list[tuple[TaskQueue, Task]]] = {}

    async def _stop(self) -> None:
        await super()._stop()
        # Tasks that are not done.
        self._fail_all(_shutting_down)

    def warm(self) -> None:
        for member in self._members.values():
            member.warm()

    @property
    def _sharing(self) -> int:
        return 1 if self._digests.backlog else len(self._members)

    def _compute(
        self, op: str, segment: Segment, size: int, **facts: Any
    ) -> Coroutine[Any, Any, bytes]:
        return self._work(self._digests, op, segment, size, **facts)

    async def _transfer(self, op: str, segment: Segment, size: int, **facts: Any) -> bytes:
        return await self._work(self._files, op, segment, size, **facts)

    def _work(
        self, queue: TaskQueue, op: str, segment: Segment, size: int, **facts: Any
    ) -> Coroutine[Any, Any, bytes]:
        # Queued before anybody awaits it: who asks next sees it.
        if not self._running:
            raise _shutting_down()
        if not 0 <= size <= segment.capacity:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"the segment of {segment.capacity} bytes is too small for {size} bytes",
            )
        task = Task(op, segment, size, self._time_for(size), **facts)
        queue.put_nowait(task)
        return task.outcome()

    def _time_for(self, size: int) -> float:
        return self._task_timeout_s + size / self._min_bytes_per_s

    def _lanes(self, process: ChildProcess) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._lane(process, queue) for queue in (self._digests, self._files)]

    async def _left(self, process: ChildProcess) -> None:
        for queue, task in self._unfinished.pop(process, []):
            await self._try_again(queue, task)

    def _lost(self) -> None:
        self._on_restart()

    def _hopeless(self, error: WeightSyncError) -> None:
        refused = error.message
        self._fail_all(lambda: WeightSyncError(Reason.FETCHER_FAILED, refused))

    async def _lane(self, process: ChildProcess, queue: TaskQueue) -> None:
        while True:
            task = await queue.get()
            if task.result.done():
                continue
            task.running = True
            try:
                with task.lend_fds() as fds:
                    answer = await process.call(task.document, fds, task.timeout_s, task.cancelled)
            except OSError as error:
                task.fail(write_fault(error, "handing a segment to a fetcher"))
            except ChildUnsentError:
                # No attempt, and nothing to clear away.
                task.running = False
                queue.put_nowait(task)
                raise
            except BaseException:
                self._unfinished.setdefault(process, []).append((queue, task))
                raise
            else:
                task.answer(*answer)

    async def _try_again(self, queue: TaskQueue, task: Task) -> None:
        temporary = task.document.get("temporary")
        if temporary is not None:
            await asyncio.to_thread(_remove, temporary)
        task.attempts += 1
        task.running = False
        if task.cancelled.is_set():
            task.result.cancel()
        elif not self._running:
            task.fail(_shutting_down())
        elif task.attempts >= _MAX_ATTEMPTS or not task.again:
            what = f"{task.document['op']} of {task.document['size']} bytes"
            task.fail(
                WeightSyncError(
                    Reason.FETCHER_FAILED,
                    f"{what} ended {task.attempts} fetcher processes; check the server's log",
                )
            )
        else:
            queue.put_nowait(task)

    def _fail_all(self, error: Callable[[], BaseException]) -> None:
        self._digests.fail_all(error)
        self._files.fail_all(error)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()


def _shutting_down() -> WeightSyncError:
    return WeightSyncError(
        Reason.SHUTTING_DOWN, "the fetchers are not running; retry when the server is back"
    )
