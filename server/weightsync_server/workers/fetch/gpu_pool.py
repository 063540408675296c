"""The process that reads the memory of trainers' GPUs, started when it is first needed."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.workers.fetch.fetch_pool import FetcherPool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from weightsync.shm.segments import Segment
    from weightsync_server.workers.fetch.fetch_api import GpuSource
    from weightsync_server.workers.runtime.child_process import ChildProcess

__all__ = ["GpuFetchPool"]

logger = logging.getLogger(__name__)

#: Copies that the process knows of: it keeps open what any of them needs, and has them take turns.
_KNOWN = 64
#: A bus is a hundred times as fast; what takes longer is stuck, and its trainer waits for it.
_MIN_BYTES_PER_S = 100e6


class GpuFetchPool(FetcherPool):
    """Fills segments from GPUs, by one process with a CUDA context for each GPU that it has used.

    A context takes about half a gigabyte of the GPU. See `FetcherPool` for what holds of a task.

    Args:
        on_restart: Called whenever the process has been lost.
    """

    def __init__(self, on_restart: Callable[[], None] = lambda: None) -> None:
        super().__init__(1, on_restart=on_restart, min_bytes_per_s=_MIN_BYTES_PER_S)
        self._starting = asyncio.Lock()
        self._closed = False
        #: Bytes of the copies that wait or run.
        self._load = 0

    async def collect(self, segment: Segment, source: GpuSource) -> None:
        """See `FetchApi.collect`; starts the process where there is none yet."""
        async with self._starting:
            if not self._running and not self._closed:
                await self._start()
        self._load += segment.capacity
        try:
            await super().collect(segment, source)
        finally:
            self._load -= segment.capacity

    async def close(self) -> None:
        """End the process for good, also one that is being started."""
        self._closed = True
        async with self._starting:
            await self.stop()

    def _time_for(self, size: int) -> float:
        # The process has a copy before that has its turn.
        return super()._time_for(max(size, self._load))

    async def _start(self) -> None:
        try:
            await self.start()
        except WeightSyncError as error:
            logger.warning("nothing is copied from trainers' GPUs: %s", error.message)
            # Nothing was written, so the trainer can do it.
            raise WeightSyncError(Reason.NOT_SUPPORTED, error.message) from error

    def _lanes(self, process: ChildProcess) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._lane(process, self._digests) for _ in range(_KNOWN)]
