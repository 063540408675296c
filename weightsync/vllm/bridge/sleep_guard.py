"""Keeps vLLM's sleep mode, trainers' transfers and our pauses apart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from weightsync.backoff import until
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.resume_guard import SLEEP_MODE, ours

#: From this level on, sleep mode throws the weights away.
_DISCARDS = 2
#: Turns of the loop within which every vLLM that we know has sent what it was asked to send.
_SENDING = 8


class SleepGuard:
    """Knows whether sleep mode holds the engine, and lets it in only between two pauses of ours.

    An engine that must stand still takes no step when it wakes up. vLLM cannot get its memory back
    without being started, so it is asked for a pause right behind the wake-up, which it takes from
    its queue before the next step. Where no memory was taken, as at level 0, it is asked nothing.

    vLLM's own `is_sleeping` cannot tell: it is also True of a paused engine, and its answer waits
    for the running step. And `wake_up` starts generation, whoever stopped it. So what `llm` has of
    `SLEEP_MODE` is replaced by what this guard has. What has begun goes to its end, though its
    caller gives up.

    Args:
        run: Runs work to its end, though its caller gives up.
        settle: Returns when no worker works in the background any more.
        stop_behind: Asks for a pause, if it must, behind all that vLLM was asked before.
        stop_again: Stops generation, if it must stand still; called after a full wake-up.
    """

    def __init__(
        self,
        llm: Any,
        run: Callable[[Awaitable[Any]], Awaitable[Any]],
        settle: Callable[[], Awaitable[None]],
        stands: Callable[[], bool],
        stop_behind: Callable[[], Awaitable[None]],
        stop_again: Callable[[], Awaitable[None]],
    ) -> None:
        self.asleep = False
        #: Whether it sleeps without some of its memory.
        self._lacks = False
        # One after the other, in the order of the calls.
        self._turns = asyncio.Lock()
        self._free = asyncio.Event()
        self._free.set()
        self._run = run
        self._settle = settle
        self._stands = stands
        self._stop_behind = stop_behind
        self._stop_again = stop_again
        self._llm = llm
        self._vllm = {name: getattr(llm, name) for name in SLEEP_MODE if hasattr(llm, name)}
        for name in self._vllm:
            setattr(llm, name, getattr(self, name))

    async def start(self) -> None:
        """Learn whether vLLM sleeps already; for a call before the first pause of ours.

        One that somebody else has paused counts as asleep if its memory may be taken: vLLM does not
        tell the two apart.
        """
        if self._llm.vllm_config.model_config.enable_sleep_mode:
            self.asleep = self._lacks = await self._ask()

    async def resumed(self) -> None:
        """Learn whether vLLM, which somebody else has started, sleeps on."""
        if not self.asleep:
            return
        async with self._turns:
            # Should it say so, it may be for another pause.
            if not await self._ask():
                self.asleep = self._lacks = False

    def check_awake(self) -> None:
        """Refuse, with ENGINE_ASLEEP, what touches weights while sleep mode holds them."""
        if self.asleep:
            raise WeightSyncError(
                Reason.ENGINE_ASLEEP, "wake the engine up, then try again: it is asleep"
            )

    def hold(self) -> None:
        """Keep sleep mode out until `release`, or raise as `check_awake`."""
        self.check_awake()
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    async def sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> None:
        """Do what AsyncLLM.sleep does, between two pauses.

        Raises RuntimeError at a level that throws the served weights away.
        """
        if level >= _DISCARDS:
            msg = f"sleep level {level} discards the served weights; use level 1 with WeightSync"
            raise RuntimeError(msg)
        await self._in_turn(
            lambda: self._fall_asleep("sleep", level, *args, takes=level > 0, **kwargs)
        )

    async def release_kv_cache_memory(self) -> None:
        """Do what AsyncLLM.release_kv_cache_memory does, between two pauses; vLLM then sleeps."""
        await self._in_turn(lambda: self._fall_asleep("release_kv_cache_memory", takes=True))

    async def wake_up(self, *args: Any, **kwargs: Any) -> Any:
        """Do what AsyncLLM.wake_up does, between two pauses; what must stand still stays so."""
        return await self._in_turn(lambda: self._wake(*args, **kwargs))

    async def _in_turn(self, work: Callable[[], Awaitable[Any]]) -> Any:
        await self._turns.acquire()
        try:
            await self._between_pauses()
        except BaseException:
            self._turns.release()
            raise
        return await self._run(self._finish(work))

    async def _finish(self, work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            # One may have begun since.
            await self._between_pauses()
            return await work()
        finally:
            self._turns.release()

    async def _fall_asleep(self, name: str, *args: Any, takes: bool, **kwargs: Any) -> None:
        asleep, lacks = self.asleep, self._lacks
        # From here on nothing new begins; a job that reads the weights may still run.
        self.asleep = True
        try:
            await self._settle()
            self._lacks = lacks or takes
            await self._ask_vllm(name, *args, **kwargs)
        except Exception:
            self._lacks = lacks
            # One that stands for us would say that it sleeps.
            self.asleep = asleep or (not self._stands() and await self._ask())
            raise

    async def _wake(self, *args: Any, **kwargs: Any) -> Any:
        if self._stands() and not self._lacks:
            # vLLM would do nothing but start.
            self.asleep = False
            return True
        answer = await self._woken(self._ask_vllm("wake_up", *args, **kwargs))
        if not self.asleep:
            await self._stop_again()
        return answer

    async def _woken(self, wake_up: Awaitable[Any]) -> Any:
        """Send all of it before the first answer: vLLM does one after the other, then a step."""
        waking = asyncio.ensure_future(wake_up)
        await _sent()
        # Between the two: a wake-up of some memory only leaves the engine asleep, and a pause
        # looks like sleep. So one that lacks none is not asked either.
        asking = asyncio.ensure_future(
            self._ask() if self._lacks else asyncio.sleep(0, result=False)
        )
        await _sent()
        answer, asleep, _ = await asyncio.gather(waking, asking, self._stop_behind())
        self.asleep = self._lacks = asleep
        return answer

    async def _ask_vllm(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with ours():
            return await self._vllm[name](*args, **kwargs)

    async def _ask(self) -> bool:
        return bool(await self._llm.is_sleeping())

    async def _between_pauses(self) -> None:
        while not self._free.is_set():
            await self._free.wait()


async def _sent() -> None:
    for _ in range(_SENDING):
        await asyncio.sleep(0)


#: How often it is looked whether the ranks are free, seconds.
_LOOK_S = 0.01


class DeviceTurns:
    """Keeps apart what waits for a trainer on the device and what waits for the device.

    A rank that synchronizes its device while a broadcast waits for its trainer waits for the
    trainer too. `settle` returns when no rank is at work for a server, or raises RuntimeError.
    """

    def __init__(self, busy: Callable[[], bool], settle: Callable[[], Awaitable[None]]) -> None:
        self.receiving = False
        self._busy = busy
        self._settle = settle

    def check_free(self) -> None:
        """Refuse, with APPLY_BUSY, what a server wants while a trainer sends."""
        if self.receiving:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                "a trainer is sending weights to this engine; try again when it has finished",
                retry_after_s=1.0,
            )

    @contextlib.asynccontextmanager
    async def trainer(self, limit_s: float) -> AsyncIterator[None]:
        """Wait at most `limit_s` for a trainer's turn, which ends with the block."""
        if not await until(lambda: not self._busy(), _LOOK_S, limit_s):
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                f"an apply of this engine is under way for over {limit_s:g} s; wait for it",
                retry_after_s=1.0,
            )
        self.receiving = True
        try:
            try:
                await self._settle()
            except RuntimeError as error:
                raise WeightSyncError(Reason.APPLY_BUSY, str(error), retry_after_s=1.0) from error
            yield
        finally:
            self.receiving = False
