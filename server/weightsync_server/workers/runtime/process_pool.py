"""So many children of one program, each in a place of its own, replaced when lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any, TypeVar

from weightsync.backoff import backoff_s
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.tasks import to_end
from weightsync_server.workers.runtime.child_process import (
    ChildGoneError,
    ChildProcess,
    Heartbeat,
    Program,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Starts in a row that may fail before it is told that there is no hope; tries go on.
_MAX_FAILED_STARTS = 3
#: A life that is shorter says no more for the next one than a failed start does.
_SHORT_LIFE_S = 1.0


class ProcessPool:
    """Keeps `count` children running; a silent one is killed, a lost one is replaced.

    Every method belongs to the event loop's thread. `ready_timeout_s` is the deadline of a start
    and, unless `alive_timeout_s` is given, of a sign of life. `most_backoff_s` is the longest wait
    between two starts of which the first failed.
    """

    def __init__(
        self,
        program: Program,
        count: int,
        *,
        ready_timeout_s: float,
        heartbeat_s: float,
        alive_timeout_s: float | None = None,
        most_backoff_s: float = 5.0,
    ) -> None:
        self._program = program
        self._count = count
        self._ready_timeout_s = ready_timeout_s
        self._heartbeat_s = heartbeat_s
        self._alive_timeout_s = alive_timeout_s or ready_timeout_s
        self._most_backoff_s = most_backoff_s
        self._members: dict[ChildProcess, Heartbeat] = {}
        self._places: list[asyncio.Task[None]] = []
        self._executor: ThreadPoolExecutor | None = None

    # Of who derives from this.

    def _facts(self, place: int) -> Mapping[str, Any]:  # noqa: ARG002 - for who derives
        return {}

    def _lanes(
        self,
        process: ChildProcess,  # noqa: ARG002 - for who derives
    ) -> Sequence[Coroutine[Any, Any, None]]:
        """Return what goes on while a child lives; each ends only with it."""
        return ()

    def _heard(self, notice: dict[str, Any]) -> None:
        """A child tells something unasked; ValueError: nobody expects that, and it is killed."""
        raise ValueError(f"an unexpected notice: {notice}")

    async def _left(self, process: ChildProcess) -> None:
        """A child is gone for certain: the kernel has forgotten it."""

    def _lost(self) -> None:
        """A child has gone and another is about to be started."""

    def _not_started(self, error: WeightSyncError) -> None:
        """A start has failed; it is tried again after a while."""

    def _hopeless(self, error: WeightSyncError) -> None:
        """No child lives and none can be started."""

    # For everybody.

    @property
    def alive(self) -> int:
        return len(self._members)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    async def start(self) -> None:
        """Return when every process is ready; when this raises, none is left running."""
        if not self._count:
            return
        executor = self._make_threads()
        starting = [_task(self._begin(place)) for place in range(self._count)]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            for outcome in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(outcome, ChildProcess):
                    await outcome.close(executor)
            await self.stop()
            raise
        for place, start in enumerate(starting):
            process = start.result()
            self._members[process] = self._tending(process)
            self._fill(place, process)

    def start_later(self) -> None:
        """Return at once; every process is started as one is that was lost."""
        self._make_threads()
        for place in range(self._count):
            self._fill(place, None)

    async def stop(self) -> None:
        await to_end(asyncio.create_task(self._stop()))

    def forget(self, segment_id: str) -> asyncio.Future[list[None]]:
        """Have every process unmap a segment now; nobody has to await that all have done so."""
        return asyncio.gather(*(member.forget(segment_id) for member in self._members.values()))

    # Inside.

    def _make_threads(self) -> ThreadPoolExecutor:
        name = f"{self._program.name}-spawn"
        self._executor = ThreadPoolExecutor(self._count, thread_name_prefix=name)
        return self._executor

    def _fill(self, place: int, first: ChildProcess | None) -> None:
        keeping = self._keep(first, place)
        self._places.append(_task(keeping, name=f"{self._program.name}-place"))

    @property
    def _running(self) -> bool:
        return bool(self._places)

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._executor is None:
            raise WeightSyncError(
                Reason.SHUTTING_DOWN,
                f"no {self._program.name} is running; retry when the server is back",
            )
        return self._executor

    async def _begin(self, place: int) -> ChildProcess:
        return await ChildProcess.start(
            self._program, self._threads, self._ready_timeout_s, self._facts(place), self._heard
        )

    def _tending(self, process: ChildProcess) -> Heartbeat:
        return Heartbeat(process, self._heartbeat_s, self._alive_timeout_s)

    async def _keep(self, process: ChildProcess | None, place: int) -> None:
        short = 0
        loop = asyncio.get_running_loop()
        while True:
            if process is None:
                process = await self._refill(place)
                self._members[process] = self._tending(process)
            begun = loop.time()
            await self._serve(process)
            process = None
            short = short + 1 if loop.time() - begun < _SHORT_LIFE_S else 0
            self._lost()
            await self._wait(short - 1)

    async def _refill(self, place: int) -> ChildProcess:
        failed = 0
        while True:
            await self._wait(failed)
            try:
                return await self._begin(place)
            except WeightSyncError as error:
                failed += 1
                name = self._program.name
                logger.error("no %s could be started: %s", name, error)  # noqa: TRY400
                self._not_started(error)
                if failed >= _MAX_FAILED_STARTS and not self.alive:
                    self._hopeless(error)

    async def _serve(self, process: ChildProcess) -> None:
        lanes = [
            asyncio.create_task(lane)
            for lane in (*self._lanes(process), self._members[process].run(), process.watch())
        ]
        try:
            # One of them ends only when the process is gone or by a fault of ours.
            await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for lane in lanes:
                lane.cancel()
            for outcome in await asyncio.gather(*lanes, return_exceptions=True):
                if not isinstance(outcome, (ChildGoneError, asyncio.CancelledError)):
                    logger.error(
                        "a fault in the server while it worked with a %s process",
                        self._program.name,
                        exc_info=outcome,
                    )
            await to_end(asyncio.create_task(self._bury(process)))

    async def _bury(self, process: ChildProcess) -> None:
        member = self._members.pop(process)
        # Only a process that is gone for certain touches neither segment nor file any more.
        await process.close(self._threads)
        member.end()
        await self._left(process)

    async def _stop(self) -> None:
        places, self._places = self._places, []
        for place in places:
            place.cancel()
        await asyncio.gather(*places, return_exceptions=True)
        # A place that was cancelled before its first step has closed nothing.
        for process in list(self._members):
            await self._bury(process)
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    async def _wait(self, failures: int) -> None:
        if failures > 0:
            await asyncio.sleep(backoff_s(failures, 0.2, self._most_backoff_s))


def _task(work: Coroutine[Any, Any, _T], name: str = "") -> asyncio.Task[_T]:
    """Return a task in a context of its own: its lines in the log are about no call."""
    return asyncio.create_task(work, name=name or None, context=Context())
