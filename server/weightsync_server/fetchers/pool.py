"""The fetcher pool: keeps N fetcher processes alive and gives them work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.faults import write_fault
from weightsync_server.fetchers.asking import Asking
from weightsync_server.fetchers.process import FetcherProcess, Gone
from weightsync_server.fetchers.queues import Task, TaskQueue
from weightsync_server.fetchers.tending import Tending
from weightsync_server.threads import to_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.segments import Segment

__all__ = ["FetcherPool"]

logger = logging.getLogger(__name__)

#: Fetchers that a task may cost before it is given up.
_MAX_ATTEMPTS = 3
#: Starts in a row that may fail before waiting tasks are refused; tries go on.
_MAX_FAILED_STARTS = 3
_MAX_BACKOFF_S = 5.0


class FetcherPool(Asking):
    """Keeps `count` processes that digest, write, read and change shards.

    A task either has its whole effect or raises; once its method has returned or raised, also by
    cancellation, no fetcher touches the segment or the file for it any more. A fetcher that dies
    is replaced and its task tried again. Every method belongs to the event loop's thread.

    Args:
        count: Processes; each digests one shard and reads or writes one file at a time.
        ready_timeout_s: Deadline of a process's start and of its signs of life, in seconds.
        on_restart: Called whenever a process has been lost.
        task_timeout_s: Seconds that any task may take,
        min_bytes_per_s: and per second of more, the bytes that it must move.
        heartbeat_s: Seconds between two signs of life.
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
            raise WeightSyncError(Reason.REQUEST_INVALID, f"{count} fetchers; use at least 1")
        self._count = count
        self._ready_timeout_s = ready_timeout_s
        self._on_restart = on_restart
        self._task_timeout_s = task_timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        self._heartbeat_s = heartbeat_s
        # Apart, so that a slow disk never holds up a digest.
        self._digests = TaskQueue()
        self._files = TaskQueue()
        self._members: dict[FetcherProcess, Tending] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._executor: ThreadPoolExecutor | None = None

    @property
    def alive(self) -> int:
        """Processes that are ready."""
        return len(self._members)

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that are ready."""
        return [member.pid for member in self._members]

    async def start(self) -> None:
        """Return when every process is ready.

        Raises:
            WeightSyncError: FETCHER_FAILED; none is left running.
        """
        self._executor = ThreadPoolExecutor(self._count, thread_name_prefix="fetcher-spawn")
        starting = [
            asyncio.create_task(FetcherProcess.start(self._executor, self._ready_timeout_s))
            for _ in range(self._count)
        ]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(outcome, FetcherProcess):
                    await outcome.close(self._executor)
            await self.stop()
            raise
        for start in starting:
            process = start.result()
            self._members[process] = self._tending(process)
            self._slots.append(asyncio.create_task(self._keep(process), name="fetcher-slot"))

    async def stop(self) -> None:
        """End every process, TERM then KILL; tasks that are not done fail with SHUTTING_DOWN."""
        await to_end(asyncio.create_task(self._stop()))

    async def _stop(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        # A slot that was cancelled before its first step has closed nothing.
        for process in list(self._members):
            await self._bury(process, [])
        self._fail_all(_shutting_down)
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def forget(self, segment_id: str) -> asyncio.Future[list[None]]:
        """Have every process unmap a segment that will not be used again.

        It is asked for at once; the result comes when all have done so and need not be awaited.
        """
        return asyncio.gather(*(member.forget(segment_id) for member in self._members.values()))

    def warm(self) -> None:
        """Have every process get ready for deltas, so that the first one is not slow."""
        for member in self._members.values():
            member.warm()

    async def _compute(self, op: str, segment: Segment, size: int, **facts: Any) -> bytes:
        return await self._work(self._digests, op, segment, size, **facts)

    async def _transfer(self, op: str, segment: Segment, size: int, **facts: Any) -> bytes:
        return await self._work(self._files, op, segment, size, **facts)

    async def _work(
        self, queue: TaskQueue, op: str, segment: Segment, size: int, **facts: Any
    ) -> bytes:
        if not self._slots:
            raise _shutting_down()
        if not 0 <= size <= segment.capacity:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"{size} bytes in a segment of {segment.capacity}"
            )
        timeout_s = self._task_timeout_s + size / self._min_bytes_per_s
        task = Task(op, segment, size, timeout_s, **facts)
        queue.put_nowait(task)
        return await task.outcome()

    async def _keep(self, first: FetcherProcess) -> None:
        """Keep one place in the pool filled, for ever."""
        await self._serve(first)
        failed = 0
        while True:
            self._on_restart()
            process = None
            while process is None:
                process = await self._start_again(failed)
                failed = 0 if process else failed + 1
            self._members[process] = self._tending(process)
            await self._serve(process)

    async def _start_again(self, failed: int) -> FetcherProcess | None:
        if failed:
            await asyncio.sleep(min(0.1 * 2**failed, _MAX_BACKOFF_S))
        try:
            return await FetcherProcess.start(self._threads, self._ready_timeout_s)
        except WeightSyncError as error:
            logger.error("no fetcher in place of a lost one: %s", error)  # noqa: TRY400
            if failed + 1 >= _MAX_FAILED_STARTS and not self.alive:
                refused = error.message
                self._fail_all(lambda: WeightSyncError(Reason.FETCHER_FAILED, refused))
            return None

    def _tending(self, process: FetcherProcess) -> Tending:
        return Tending(process, self._heartbeat_s, self._ready_timeout_s)

    async def _serve(self, process: FetcherProcess) -> None:
        """Give a process work until it is gone; what it had not finished is tried again."""
        lost: list[tuple[TaskQueue, Task]] = []
        lanes = [
            asyncio.create_task(self._lane(process, self._digests, lost)),
            asyncio.create_task(self._lane(process, self._files, lost)),
            asyncio.create_task(self._members[process].run()),
            asyncio.create_task(process.watch()),
        ]
        try:
            # One of them ends only when the process is gone or by a fault of ours.
            await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for lane in lanes:
                lane.cancel()
            for outcome in await asyncio.gather(*lanes, return_exceptions=True):
                if not isinstance(outcome, (Gone, asyncio.CancelledError)):
                    logger.error("fault in a fetcher's lane", exc_info=outcome)
            await to_end(asyncio.create_task(self._bury(process, lost)))

    async def _bury(self, process: FetcherProcess, lost: list[tuple[TaskQueue, Task]]) -> None:
        member = self._members.pop(process)
        # Only a process that is gone for certain touches neither segment nor file any more.
        await process.close(self._threads)
        member.end()
        for queue, task in lost:
            await self._try_again(queue, task)

    async def _lane(
        self, process: FetcherProcess, queue: TaskQueue, lost: list[tuple[TaskQueue, Task]]
    ) -> None:
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
            except BaseException:
                lost.append((queue, task))
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
        elif task.attempts >= _MAX_ATTEMPTS or not task.again:
            what = f"{task.document['op']} of {task.document['size']} bytes"
            task.fail(
                WeightSyncError(
                    Reason.FETCHER_FAILED,
                    f"{what} cost {task.attempts} fetcher processes; see the server's log",
                )
            )
        else:
            queue.put_nowait(task)

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            raise _shutting_down()
        return self._executor

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
