"""Makes segments within the budget, publishes them, and retires them without losing count.

A retired segment is memory of the host until every process that mapped it has let go, so it stays
in the budget until then.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync.shm.segments import Segment, reserved_size
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from weightsync.shm.segment_socket import SegmentServer
    from weightsync_server.residency.budget import SegmentBudget
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["MAKERS", "SegmentAllocator"]

_UNMAP_S = 10.0
#: Seconds between two looks whether a trainer still writes to what it was granted.
_WRITERS_S = 0.5
#: Threads that make segments: half of the cores. Who is taken off its core while it touches pages
#: keeps every other thread from mapping, the one with the GIL included.
MAKERS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))


class SegmentAllocator:
    """Owns every segment of one model.

    Args:
        budget: Shared by all models of the server.
        server: Hands descriptors to engines.
        fetchers: Map segments too, and are told when one is retired.

    Attributes:
        mappers: Who is told to unmap a segment; each returns when that is done.
        engines: Names of those that are connected, and may map what is exposed.
    """

    def __init__(self, budget: SegmentBudget, server: SegmentServer, fetchers: FetchApi) -> None:
        self.budget = budget
        self._server = server
        self.mappers: list[Callable[[str], Awaitable[object]]] = [fetchers.forget]
        self.engines: set[str] = set()
        # Which engines may map a segment.
        self._exposed: dict[str, set[str]] = {}
        self._retired: dict[str, int] = {}
        self._granted: dict[str, int] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._makers = ThreadPoolExecutor(MAKERS, thread_name_prefix="segment")

    @property
    def retired(self) -> frozenset[str]:
        """Ids of retired segments that an engine may still map."""
        return frozenset(self._retired)

    @property
    def retired_bytes(self) -> int:
        """Bytes that count only because an engine, or a trainer, has not let go."""
        return sum(self._retired.values()) + sum(self._granted.values())

    async def create(self, size: int, reserved: int = 0) -> Segment:
        """Return a published segment for `size` bytes, made off the event loop.

        Args:
            size: Bytes it must hold.
            reserved: Bytes of the budget that the caller has reserved for it already. They pass
                to the segment; when this fails they stay the caller's.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, DISK_EXHAUSTED (descriptors); nothing is reserved.
        """
        with translate_os_errors("reserving shared memory"):
            await failpoints.reach("stage.allocate")
        capacity = reserved_size(size)
        more = capacity - min(reserved, capacity)
        self.budget.reserve(more)
        making = asyncio.get_running_loop().run_in_executor(self._makers, _make, size)
        try:
            segment, fd = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda done: self._orphaned(done, more))
            raise
        except BaseException:
            self.budget.release(more, touched=False)
            raise
        self.budget.touched(capacity)
        self._server.publish(segment.id, fd, segment.capacity)
        return segment

    async def write(self, make: Callable[[], Segment]) -> Segment:
        """Return the published segment that `make` has made and filled, in a thread.

        A caller that is cancelled leaves nothing, and no thread at work.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, DISK_EXHAUSTED (descriptors); nothing is left.
        """
        made: list[Segment] = []
        try:
            await in_thread(lambda: made.append(make()))
            self.take(made[0])
        except BaseException:
            for segment in made:
                segment.close()
            raise
        return made[0]

    def take(self, segment: Segment) -> None:
        """Own and publish a segment that somebody else made.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED, DISK_EXHAUSTED (descriptors); it is still the
                caller's.
        """
        fd = _offered(segment)
        try:
            self.budget.reserve(segment.capacity)
        except WeightSyncError:
            os.close(fd)
            raise
        self.budget.touched(segment.capacity)
        self._server.publish(segment.id, fd, segment.capacity)

    def retire(self, segment: Segment) -> None:
        """Hand it out no more; its memory is free when nobody else maps it."""
        self._server.withdraw(segment.id)
        if segment.granted:
            self._granted[segment.id] = segment.capacity
            waiting = asyncio.create_task(self._without_writers(segment))
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
            return
        exposed = segment.id in self._exposed
        if exposed:
            self._retired[segment.id] = segment.capacity
        leaving = asyncio.create_task(self._unmap(segment, 0 if exposed else segment.capacity))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def unmapped(self) -> None:
        """Wait until this server has unmapped what was retired, for some seconds at most."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_UNMAP_S)

    async def close(self) -> None:
        """Wait as `unmapped` does and end the threads; nothing is made any more."""
        for waiting in self._waiting:
            waiting.cancel()
        await self.unmapped()
        self._makers.shutdown(wait=False)

    def expose(self, ids: Iterable[str]) -> None:
        """Remember that the connected engines may map these from now on."""
        for name in ids if self.engines else ():
            self._exposed.setdefault(name, set()).update(self.engines)

    def exposed_to(self, engine: str) -> frozenset[str]:
        """Return the ids that an engine may have mapped, retired ones included."""
        return frozenset(name for name, engines in self._exposed.items() if engine in engines)

    def release(self, ids: Iterable[str], engine: str) -> None:
        """Take note that no process of an engine maps these any more.

        Their memory is free as soon as that is so for every engine.
        """
        for name in ids:
            engines = self._exposed.get(name)
            if engines is None:
                continue
            engines.discard(engine)
            if not engines:
                self._free(name)

    def conceal(self, segment: Segment) -> None:
        """Retire what engines that need it have mapped, or come too late for: nobody is asked."""
        self._exposed.pop(segment.id, None)
        self.retire(segment)

    def forget_engine(self, engine: str) -> None:
        """Take note that an engine is gone for good, and what it had mapped with it."""
        self.engines.discard(engine)
        self.release(self.exposed_to(engine), engine)

    def _free(self, name: str) -> None:
        del self._exposed[name]
        size = self._retired.pop(name, None)
        if size is not None:
            self.budget.release(size)

    async def _without_writers(self, segment: Segment) -> None:
        # The kernel tells nobody when the last writer goes, so it is asked.
        while not segment.taken_back():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(_WRITERS_S)
        del self._granted[segment.id]
        self.retire(segment)

    async def _unmap(self, segment: Segment, freed: int) -> None:
        # In a thread: taking 5 GB out of the page tables takes a tenth of a second.
        await asyncio.get_running_loop().run_in_executor(None, segment.close)
        try:
            await asyncio.gather(*(forget(segment.id) for forget in self.mappers))
        finally:
            self.budget.release(freed)

    def _orphaned(self, making: asyncio.Future[tuple[Segment, int]], reserved: int) -> None:
        self.budget.release(reserved, touched=False)
        if not making.cancelled() and making.exception() is None:
            segment, fd = making.result()
            segment.close()
            os.close(fd)


def _make(size: int) -> tuple[Segment, int]:
    """Return a segment and the descriptor that is handed out."""
    segment = Segment.create(size)
    try:
        return segment, _offered(segment)
    except WeightSyncError:
        segment.close()
        raise


def _offered(segment: Segment) -> int:
    with translate_os_errors("offering shared memory to the engine"):
        return segment.read_only_fd()
