"""Keeps vLLM's sleep mode and our pauses apart."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["SleepGuard"]

#: From this level on, sleep mode throws the weights away.
_DISCARDS = 2


class SleepGuard:
    """Knows whether sleep mode holds the engine, and lets it in only between two pauses of ours.

    vLLM's own `is_sleeping` cannot tell: it is also True of a paused engine, and its answer waits
    for the running step. And `wake_up` starts generation, whoever stopped it. So the two calls
    that change sleep mode go through this guard, on this one AsyncLLM.

    Args:
        llm: vLLM's AsyncLLM; its `sleep` and `wake_up` wait while `hold` is in force.
        settle: Returns when no worker works in the background any more.
        stop_again: Stops generation if it must stand still; called after a full wake-up.
    """

    def __init__(
        self,
        llm: Any,
        settle: Callable[[], Awaitable[None]],
        stop_again: Callable[[], Awaitable[None]],
    ) -> None:
        self.asleep = False
        # One after the other, in the order of the calls.
        self._turns = asyncio.Lock()
        self._free = asyncio.Event()
        self._free.set()
        self._settle = settle
        self._stop_again = stop_again
        self._ask, self._sleep, self._wake_up = llm.is_sleeping, llm.sleep, llm.wake_up
        llm.sleep, llm.wake_up = self.sleep, self.wake_up

    def check_awake(self) -> None:
        """Refuse what touches weights while sleep mode holds them.

        Raises:
            WeightSyncError: ENGINE_ASLEEP.
        """
        if self.asleep:
            raise WeightSyncError(
                Reason.ENGINE_ASLEEP, "the engine sleeps; wake it up, then try again"
            )

    def hold(self) -> None:
        """Keep sleep mode out until `release`.

        Raises:
            WeightSyncError: ENGINE_ASLEEP.
        """
        self.check_awake()
        self._free.clear()

    def release(self) -> None:
        """Let sleep mode in again."""
        self._free.set()

    async def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> None:
        """Do what AsyncLLM.sleep does, between two pauses.

        Raises:
            RuntimeError: the level would throw away weights that every rank has proved.
        """
        if level >= _DISCARDS:
            msg = f"sleep level {level} throws the served weights away; use level 1 with WeightSync"
            raise RuntimeError(msg)
        async with self._turns:
            await self._between_pauses()
            # From here on nothing new begins; a job that reads the weights may still run.
            self.asleep = True
            try:
                await self._settle()
            except BaseException:
                self.asleep = False
                raise
            await self._sleep(level, *args, **kwargs)

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        """Do what AsyncLLM.wake_up does, between two pauses."""
        async with self._turns:
            await self._between_pauses()
            answer = await self._wake_up(*args, **kwargs)
            # A wake-up of some memory only leaves the engine asleep; a full one starts generation.
            # One that is awake is not asked: a pause that began meanwhile looks like sleep.
            if self.asleep:
                self.asleep = bool(await self._ask())
            if not self.asleep:
                await self._stop_again()
            return answer

    async def _between_pauses(self) -> None:
        while not self._free.is_set():
            await self._free.wait()
