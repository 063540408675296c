"""What stands between the engines of this host and their fleet, and a pause of what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence

from weightsync.engine import CacheUse, OpenApply, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine.engine_set import EngineSet
from weightsync_server.engine.host_apply import LocalEngine, TakenEngines, take_engines
from weightsync_server.ops.tasks import cancel_tasks, start_task
from weightsync_server.ops.traces import Work, within

logger = logging.getLogger(__name__)


class ServingGate:
    """The host's side of `EngineContext.joining`, which outlives any one task.

    All that let an engine serve take that lock; `is_shut` says whether this gate has it.
    """

    def __init__(self, joining: asyncio.Lock) -> None:
        self._joining = joining
        self.is_shut = False

    async def shut(self) -> None:
        """Let no engine begin to serve from now on; waits for one that is about to."""
        if not self.is_shut:
            await self._joining.acquire()
            self.is_shut = True

    def open(self) -> None:
        """Let those that wait serve what is decided."""
        if self.is_shut:
            self.is_shut = False
            self._joining.release()


def _log_fault(closing: asyncio.Task[None]) -> None:
    if not closing.cancelled() and (error := closing.exception()) is not None:
        logger.error(
            "the engines could not be released after an apply of the fleet; the server asks every "
            "rank what it holds",
            exc_info=error,
        )


class TakenHost:
    """Stands between a host and its fleet, and has the engines from its first step until its end.

    A step goes on when its caller is cancelled. An engine whose lease runs out is fenced, as in
    every pause that others decide the end of.

    `record` is what the engines hold in the end. The `gate` is shut as soon as they are taken; the
    caller that ends this opens it. `prepare_s` is the longest wait for an engine that cannot be
    asked yet. `stands_still` says whether generation may have stopped for it, and `work` what is
    traced of its steps; None: nothing is.
    """

    def __init__(
        self, record: VersionRecord, engines: EngineSet, gate: ServingGate, prepare_s: float
    ) -> None:
        self.record, self.stands_still = record, False
        self.work: Work | None = None
        self._engines, self._gate, self._prepare_s = engines, gate, prepare_s
        self._taken = contextlib.AsyncExitStack()
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Let go of the engines as they are: those that stand still are left to be reconciled.

        A caller that is cancelled does not wait for that.
        """
        if self.work is not None:
            self.work.end({"version": self.record.version}, "it was called off")
        closing = start_task(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            # Nobody else would hear of a fault.
            closing.add_done_callback(_log_fault)
            raise

    async def _close(self) -> None:
        await cancel_tasks(self._task)
        await self._give_back(asyncio.CancelledError() if self.stands_still else None)

    async def _take(self) -> TakenEngines:
        group = TakenEngines(secrets.token_hex(8), whole=self._engines.several)
        taken = take_engines(self._engines.named(""), group, None, self._prepare_s)
        await self._taken.enter_async_context(taken)
        # Those that are found to serve from now on wait, and serve what is live afterwards.
        await self._gate.shut()
        return group

    async def _give_back(self, error: BaseException | None = None) -> None:
        await self._taken.__aexit__(type(error) if error is not None else None, error, None)

    async def _carry_out(self, step: Callable[[], Awaitable[None]]) -> None:
        """Wait for a step, and before it for that of a caller that was cancelled."""
        await self._ended()
        with within(self.work):
            self._task = asyncio.create_task(self._carried_out(step))
        await self._ended()

    async def _carried_out(self, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        except BaseException as error:
            await self._give_back(error)
            raise

    async def _ended(self) -> None:
        if self._task is None:
            return
        if not self._task.done():
            await asyncio.wait({self._task})
        if self._task.cancelled():
            raise WeightSyncError(
                Reason.CANCELLED,
                "the part of this host in the fleet's apply was cancelled; see "
                "`weightsync fleet status`",
            )
        self._task.result()


class HostPause(TakenHost):
    """Lets the engines stand still with what they hold already, and writes nothing."""

    _standing: Sequence[LocalEngine] = ()

    async def pause(self) -> None:
        """Return when all engines stand still; if one does not, those that did go on."""
        self.stands_still = True
        await self._carry_out(self._pause)

    async def commit(self) -> None:
        await self._carry_out(self._resume)

    async def call_off(self) -> None:
        """As `commit`: what was decided is not what they do not hold."""
        await self.commit()

    async def _pause(self) -> None:
        if self._standing:
            return
        group = await self._take()
        for one in group.members:
            one.session.check_fences()
            if one.live.record.content_digest != self.record.content_digest:
                raise WeightSyncError(
                    Reason.ENGINE_AWAY,
                    f"engine {one.name} serves a different version than this host reported to its "
                    "fleet; apply again",
                )
        standing: list[LocalEngine] = []
        settled = asyncio.Event()

        async def stand(one: LocalEngine) -> None:
            live = one.live.record.version
            open_apply = OpenApply(group.apply_id, live, live)
            pause = one.session.paused(PauseSpec(cache=CacheUse.KEEP), open_apply)
            try:
                await self._taken.enter_async_context(pause)
            except BaseException:
                # The others do not wait for one that does not stand.
                settled.set()
                raise
            standing.append(one)
            if len(standing) == len(group.members):
                settled.set()
            await settled.wait()
            if len(standing) < len(group.members):
                await one.session.resume(one.live)

        if failures := await _each(group.members, stand):
            raise failures[0]
        self._standing = standing

    async def _resume(self) -> None:
        failures = await _each(self._standing, lambda one: one.session.resume(one.live))
        if failures:
            raise failures[0]
        self._standing = ()
        await self._give_back()


async def _each(
    members: Sequence[LocalEngine], work: Callable[[LocalEngine], Awaitable[None]]
) -> list[BaseException]:
    """Do something with all engines at once; return what failed, each known to its engine."""
    outcomes = await asyncio.gather(*map(work, members), return_exceptions=True)
    for one, outcome in zip(members, outcomes, strict=True):
        one.error = outcome
    return [outcome for outcome in outcomes if outcome is not None]
