"""Makes segments within the budget, publishes them, and retires them without losing count.

A retired segment stays in the budget until every process that mapped it has let go.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.backoff import until
from weightsync.errors import Reason, WeightSyncError
from weightsync.process_limits import available_bytes
from weightsync.shm.segments import Segment, reserved_size
from weightsync_server.ops.os_errors import translate_os_errors, write_fault
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from weightsync.shm.segment_socket import SegmentServer
    from weightsync_server.workers.fetch.fetch_api import FetchApi


_UNMAP_S = 10.0
#: Seconds between two looks whether a trainer still writes to what it was granted.
_WRITERS_S = 0.5
#: Threads that make segments: half of the cores. Who is taken off its core while it touches pages
#: keeps every other thread from mapping, the one with the GIL included.
MAKERS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))


class SegmentAllocator:
    """Owns every segment of one model; all models of the server share the `budget`.

    Each of the `mappers` unmaps a segment before it returns.
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
        return frozenset(self._retired)

    @property
    def retired_bytes(self) -> int:
        """Bytes that count only because an engine, or a trainer, has not let go."""
        return sum(self._retired.values()) + sum(self._granted.values())

    async def create(self, size: int, reserved: int = 0) -> Segment:
        """Return a published segment for `size` bytes, made off the event loop.

        The caller has `reserved` bytes of the budget already, and keeps them when this fails.
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

        A cancelled caller leaves nothing, and no thread at work.
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
        """Own and publish a segment that another made; when this raises, it still is theirs."""
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
        for name in ids if self.engines else ():
            self._exposed.setdefault(name, set()).update(self.engines)

    def exposed_to(self, engine: str) -> frozenset[str]:
        """Return the ids that an engine may have mapped, retired ones included."""
        return frozenset(name for name, engines in self._exposed.items() if engine in engines)

    def release(self, ids: Iterable[str], engine: str) -> None:
        """Note that an engine maps these no more; once no engine does, their memory is free."""
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
        self.engines.discard(engine)
        self.release(self.exposed_to(engine), engine)

    def _free(self, name: str) -> None:
        del self._exposed[name]
        size = self._retired.pop(name, None)
        if size is not None:
            self.budget.release(size)

    async def _without_writers(self, segment: Segment) -> None:
        # The kernel tells nobody when the last writer goes, so it is asked.
        await until(segment.taken_back, _WRITERS_S)
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
    segment = Segment.create(size)
    try:
        return segment, _offered(segment)
    except WeightSyncError:
        segment.close()
        raise


def _offered(segment: Segment) -> int:
    with translate_os_errors("offering shared memory to the engine"):
        return segment.read_only_fd()


#: Left to everything else on the host, in bytes.
_HEADROOM = 64 << 20


class SegmentBudget:
    """Counts shared memory of all models; what it grants never exceeds its limit or the host.

    A `limit_bytes` of 0 means 80 % of what is available now.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit = limit_bytes or available_bytes() * 8 // 10
        self.reserved = 0
        self._untouched = 0

    def reserve(self, size: int) -> None:
        """Count `size` bytes that `touched` or `release` will follow."""
        if self.reserved + size > self.limit:
            raise WeightSyncError(
                Reason.MEMORY_EXHAUSTED,
                f"{size} bytes of shared memory are needed, {self.reserved} of {self.limit} are "
                "reserved; raise memory_bytes, lower slots, or delete or unpin versions",
                metadata=self._numbers(size),
            )
        try:
            free = available_bytes()
        except OSError as error:
            # No descriptor is left to ask with.
            raise write_fault(error, "asking for the free memory of the host") from error
        # What was reserved but not written yet does not show in the host's numbers.
        free -= self._untouched + _HEADROOM
        if size > free:
            raise WeightSyncError(
                Reason.MEMORY_EXHAUSTED,
                f"{size} bytes of shared memory are needed, the host or its cgroup has "
                f"{max(0, free)} left; free memory or lower slots",
                metadata=self._numbers(size) | {"available_bytes": str(max(0, free))},
            )
        self.reserved += size
        self._untouched += size

    def touched(self, size: int) -> None:
        """Tell that `size` reserved bytes now are memory of the host."""
        self._untouched -= size

    def release(self, size: int, *, touched: bool = True) -> None:
        self.reserved -= size
        if not touched:
            self._untouched -= size

    def _numbers(self, size: int) -> dict[str, str]:
        return {
            "needed_bytes": str(size),
            "reserved_bytes": str(self.reserved),
            "limit_bytes": str(self.limit),
        }
