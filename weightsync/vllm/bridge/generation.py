"""Stops and starts vLLM, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from weightsync import failpoints
from weightsync.engine import CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.engine_keys import EngineKeys
from weightsync.vllm.bridge.live_versions import LiveVersions
from weightsync.vllm.bridge.llm_calls import VllmCalls, error_text, guarded

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long vLLM may take to stop or to start while no lease tells how long, seconds.
PATIENCE_S = 15.0


class GenerationControl:
    """Knows whether vLLM may take steps, and waits for it no longer than a lease lasts.

    A call that takes longer, or fails on one of several cores, is given up, not cancelled. vLLM is
    stopped again when it returns, and until then nothing else is asked of it: nobody knows in which
    order it would do both. All cores stand before any resumes, and all are labelled before any
    resumes. `on_late` is called with one sentence before the caller learns of it.
    """

    def __init__(self, vllm: VllmCalls, keys: EngineKeys, on_late: Callable[[str], None]) -> None:
        self.generating = True
        self.patience_s = PATIENCE_S
        self.live = LiveVersions(labelled="weight_version" in vllm.capabilities)
        self._vllm = vllm
        self.keys = keys
        #: What the last pause wanted; what stopped for another reason reads no old keys.
        self._cache = CacheUse.RECOMPUTE
        self._on_late = on_late
        #: Whether no key has been computed since vLLM's caches were empty.
        self._cleared = True
        self._late = ""
        self._unsettled: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._unsettled is not None:
            self._unsettled.cancel()

    def check_settled(self) -> None:
        """Raise ENGINE_FENCED while a call that was given up has not returned."""
        if self._unsettled is not None and not self._unsettled.done():
            raise WeightSyncError(
                Reason.ENGINE_FENCED,
                f"{self._late} and has not paused since; wait for it, or restart vLLM",
            )

    async def stop(self, spec: PauseSpec) -> str:
        """Return the mode that was used, once generation stands still.

        Raises ENGINE_FENCED if vLLM took too long or not all cores did it, and ENGINE_AWAY if it
        did not do it and generates as before.
        """
        generated = self.generating
        self._cache = spec.cache
        try:
            return await self._stop(spec)
        except WeightSyncError as error:
            if error.reason is Reason.ENGINE_AWAY and generated:
                # vLLM stays paused when finishing a pause fails.
                self.generating, self._cleared = True, False
                self.recompute()
                await guarded(self._vllm.resume())
            raise

    def recompute(self) -> None:
        """Let what is in flight read no keys of before after the next start, whatever was asked."""
        self._cache = CacheUse.RECOMPUTE

    async def first_stop(self) -> None:
        """Return when generation stands still, however long that takes in a vLLM that starts."""
        await guarded(self._pause("keep", clear_cache=False))
        await self.keys.begin()

    async def halt(self, mode: str = "keep") -> None:
        """Return when generation stands still; without effect when it does."""
        await self._owed(self._pause(mode, clear_cache=False), "pause")

    async def start(self, version: int, digest: str) -> bool:
        """Generate; returns whether outputs have the version as a label, and raises as `stop`.

        `digest` is of the content that was proved; "": what vLLM loaded.
        """
        stood = not self.generating
        # Before anything is awaited: no commit may come between the proof and the first step.
        self.generating = True
        self.live.begin(version, self.keys.kept(self._cache, cleared=self._cleared))
        self._cleared = False
        one = self._vllm.cores.count == 1
        start = self._start_one if one else self._start_all
        try:
            labelled = await self._owed(start(version, digest, stood=stood), "resume")
        except WeightSyncError as error:
            if error.reason is Reason.ENGINE_AWAY:
                # It may run although it did not do all, such as take the keys of the version.
                with contextlib.suppress(WeightSyncError):
                    await guarded(self._pause("keep", clear_cache=False))
            raise
        self._cache = CacheUse.RECOMPUTE
        self.live.confirm()
        return labelled

    async def _start_one(self, version: int, digest: str, *, stood: bool) -> bool:
        del stood
        # All are sent before an answer is waited for; vLLM does them one after the other.
        move = self.keys.move(digest, self._cache)
        labelled, _, _ = await asyncio.gather(self._set_version(version), move, self._resume())
        return labelled

    async def _start_all(self, version: int, digest: str, *, stood: bool) -> bool:
        """Start several engine cores: where they step together, a resume waits for all of them."""
        if not stood:
            await self._vllm.pause("keep", clear_cache=False)
        labelled = await self._set_version(version)
        await self.keys.move(digest, self._cache)
        await self._resume()
        return labelled

    async def _set_version(self, version: int) -> bool:
        try:
            return bool(version) and await self._vllm.set_version(str(version))
        except BaseException:
            self.live.unlabelled()
            raise

    def label(self, version: int) -> asyncio.Task[bool]:
        """Begin to label outputs, behind all that vLLM was asked before; the task never raises."""
        self.live.relabel(str(version))
        return asyncio.create_task(self._label(version))

    async def _label(self, version: int) -> bool:
        try:
            return await self._set_version(version)
        except Exception:
            logger.exception("weightsync: outputs are not labelled with version %d", version)
            return False

    async def _stop(self, spec: PauseSpec) -> str:
        clears = self.keys.clears(spec.cache)
        if spec.mode != "wait":
            await self._owed(self._pause(spec.mode, clear_cache=clears), "pause")
            return spec.mode
        waiting = asyncio.ensure_future(self._pause("wait", clear_cache=clears))
        done, _ = await asyncio.wait({waiting}, timeout=spec.wait_timeout_s)
        if done:
            await self._owed(waiting, "pause")
            return "wait"
        # A second pause replaces the mode; the first one is answered at the engine's next idle
        # moment, which the second one brings about.
        after = self._vllm.pause(spec.after_wait, clear_cache=clears)
        await self._owed(asyncio.gather(after, waiting), "pause")
        return spec.after_wait

    async def _pause(self, mode: str, *, clear_cache: bool) -> None:
        await failpoints.reach("bridge.pause")
        await self._vllm.pause(mode, clear_cache=clear_cache)
        if clear_cache:
            self._cleared = True
        self.generating = False

    async def _resume(self) -> None:
        await failpoints.reach("bridge.resume")
        await self._vllm.resume()

    async def _owed(self, call: Awaitable[T], what: str) -> T:
        task = asyncio.ensure_future(call)
        done, _ = await asyncio.wait({task}, timeout=self.patience_s)
        if not done:
            raise self._given_up(task, f"vLLM did not answer a {what} within {self.patience_s:g} s")
        error = None if task.cancelled() else task.exception()
        if error is not None and self._vllm.cores.count > 1:
            raise self._given_up(
                task, f"an engine core of vLLM failed in a {what} ({error_text(error)})"
            )
        return await guarded(task)

    def _given_up(self, call: asyncio.Future[Any], why: str) -> WeightSyncError:
        """Fence, stop vLLM again behind that call, and return what its caller is told."""
        self._late = why
        self._unsettled = asyncio.create_task(self._settle(call))
        self._on_late(why)
        return WeightSyncError(Reason.ENGINE_FENCED, f"{why}; restart vLLM if this repeats")

    async def _settle(self, late: asyncio.Future[Any]) -> None:
        with contextlib.suppress(Exception):
            await late
        try:
            await self._vllm.pause("keep", clear_cache=False)
        except Exception:
            # It counts as generating: nothing is written, and a start stops it first.
            logger.exception("weightsync: vLLM could not be stopped again")
        else:
            self.generating = False
