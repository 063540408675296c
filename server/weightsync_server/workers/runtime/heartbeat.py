"""Signs of life of a child, and what it is told with them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync_server.workers.runtime.child_process import ChildProcess

__all__ = ["Heartbeat"]

#: Segment ids in one message, which must fit into the socket's buffer at once.
_BATCH = 1000


class Heartbeat:
    """Asks one child for a sign of life now and then; a silent one is killed.

    Args:
        process: The child.
        heartbeat_s: Seconds between two questions.
        timeout_s: Seconds that it has for the answer.
    """

    def __init__(self, process: ChildProcess, heartbeat_s: float, timeout_s: float) -> None:
        self._process = process
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._wanted = asyncio.Event()
        self._warm = False
        self._forgetting: dict[str, asyncio.Future[None]] = {}

    def forget(self, segment_id: str) -> asyncio.Future[None]:
        """Have the child unmap a segment; the result tells when it has, or has died."""
        if segment_id not in self._forgetting:
            self._forgetting[segment_id] = asyncio.get_running_loop().create_future()
        self._wanted.set()
        return self._forgetting[segment_id]

    def warm(self) -> None:
        """Have a fetcher get ready for deltas."""
        self._warm = True
        self._wanted.set()

    async def run(self) -> None:
        """Tend the child until it is gone.

        Raises:
            Gone: It is.
        """
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            batch = list(self._forgetting.items())[:_BATCH]
            request = {"op": "tend", "forget": [name for name, _ in batch], "warm": self._warm}
            self._warm = False
            await self._process.call(request, (), self._timeout_s)
            for name, done in batch:
                del self._forgetting[name]
                _settle(done)
            if self._forgetting:
                self._wanted.set()

    def end(self) -> None:
        """Settle what is open: the mappings have gone with the process."""
        for done in self._forgetting.values():
            _settle(done)
        self._forgetting.clear()


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
