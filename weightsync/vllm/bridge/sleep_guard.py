"""Keeps vLLM's sleep mode and our pauses apart."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.resume_guard import ours

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["SleepGuard"]

#: From this level on, sleep mode throws the weights away.
_DISCARDS = 2
#: Turns of the loop within which every vLLM that we know has sent what it was asked to send.
_SENDING = 8


class SleepGuard:
    """Knows whether sleep mode holds the engine, and lets it in only between two pauses of ours.

    An engine that must stand still takes no step when it wakes up from level 1. vLLM cannot be
    woken without being started, so it is asked for a pause right behind the wake-up, before it has
    answered: it takes all that it was asked from its queue before the next step, and to bring the
    memory back lasts longer than to ask. After level 0, which takes no memory away, there may be
    one step before the pause is in that queue.

    vLLM's own `is_sleeping` cannot tell: it is also True of a paused engine, and its answer waits
    for the running step. And `wake_up` starts generation, whoever stopped it. So the two calls
    that change sleep mode go through this guard, on this one AsyncLLM.

    Args:
        llm: vLLM's AsyncLLM; its `sleep` and `wake_up` wait while `hold` is in force.
        settle: Returns when no worker works in the background any more.
        stands: Whether generation must stand still.
        stop_behind: Asks for a pause, if it must, behind all that vLLM was asked before.
        stop_again: Stops generation, if it must stand still; called after a full wake-up.
    """

    def __init__(
        self,
        llm: Any,
        settle: Callable[[], Awaitable[None]],
        stands: Callable[[], bool],
        stop_behind: Callable[[], Awaitable[None]],
        stop_again: Callable[[], Awaitable[None]],
    ) -> None:
        self.asleep = False
        # One after the other, in the order of the calls.
        self._turns = asyncio.Lock()
        self._free = asyncio.Event()
        self._free.set()
        self._settle = settle
        self._stands = stands
        self._stop_behind = stop_behind
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
        """Do what AsyncLLM.wake_up does, between two pauses; what must stand still stays so."""
        async with self._turns:
            await self._between_pauses()
            if not self.asleep and self._stands():
                # Nothing sleeps: vLLM would do nothing but start.
                return True
            answer = await self._woken(self._wake_up(*args, **kwargs))
            if not self.asleep:
                await self._stop_again()
            return answer

    async def _woken(self, wake_up: Awaitable[Any]) -> Any:
        """Send all of it before the first answer: vLLM does one after the other, then a step."""
        with ours():
            waking = asyncio.ensure_future(wake_up)
        await _sent()
        # Between the two: a wake-up of some memory only leaves the engine asleep, and a pause
        # looks like sleep. So one that is awake is not asked either.
        asking = asyncio.ensure_future(
            self._ask() if self.asleep else asyncio.sleep(0, result=False)
        )
        await _sent()
        answer, asleep, _ = await asyncio.gather(waking, asking, self._stop_behind())
        self.asleep = bool(asleep)
        return answer

    async def _between_pauses(self) -> None:
        while not self._free.is_set():
            await self._free.wait()


async def _sent() -> None:
    for _ in range(_SENDING):
        await asyncio.sleep(0)
