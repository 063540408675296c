"""Work that runs to its end whether or not its caller waits."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync.vllm.bridge.llm_calls import error_text

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["ShieldedTasks"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ShieldedTasks:
    """Keeps tasks until they end; a caller that is cancelled cancels none of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Begin work that nobody need wait for."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def begin(self, work: Awaitable[object]) -> None:
        """Begin work whose failure is logged, as nobody waits for it."""
        self.start(work).add_done_callback(_log_failure)

    async def run(self, work: Awaitable[T]) -> T:
        """Return what the work returns; it goes on when the caller is cancelled."""
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Nobody will look at its outcome any more.
            task.add_done_callback(_log_failure)
            raise

    def cancel(self) -> None:
        """End all of them."""
        for task in list(self._tasks):
            task.cancel()


def _log_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("weightsync: %s", error_text(task.exception() or Exception()))
