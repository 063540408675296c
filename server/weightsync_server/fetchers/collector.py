"""The process that reads the memory of trainers' GPUs, started when it is first needed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync_server.fetchers.pool import FetcherPool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from weightsync.segments import Segment
    from weightsync_server.children.process import ChildProcess
    from weightsync_server.fetchers.asking import Piece

__all__ = ["Collector"]

#: Shards at once: while some are copied, the next are opened. With three, which all use the bus and
#: so end together, it stood idle for a seventh of the time.
_AT_ONCE = 6


class Collector(FetcherPool):
    """Fills segments from GPUs, by one process with a CUDA context for each GPU that it has used.

    A context takes about half a gigabyte of the GPU. See `FetcherPool` for what holds of a task.

    Args:
        on_restart: Called whenever the process has been lost.
    """

    def __init__(self, on_restart: Callable[[], None] = lambda: None) -> None:
        super().__init__(1, on_restart=on_restart)
        self._starting = asyncio.Lock()

    async def collect(
        self, segment: Segment, device: str, handles: Sequence[str], pieces: Sequence[Piece]
    ) -> None:
        """See `Asking.collect`; starts the process where there is none yet."""
        async with self._starting:
            if not self._running:
                await self.start()
        await super().collect(segment, device, handles, pieces)

    def _lanes(self, process: ChildProcess) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._lane(process, self._digests) for _ in range(_AT_ONCE)]
