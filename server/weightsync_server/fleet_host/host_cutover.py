"""One version on its way to all engines of this host, as far as the fleet has let it come."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from weightsync.engine import BETWEEN_STEPS
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.apply_checks import check_members, check_rolling_slots
from weightsync_server.engine.engine_group import EngineGroup, take_engines
from weightsync_server.engine.group_prepare import drop_all, plans_for, prepare_all
from weightsync_server.engine.journal_file import Answer
from weightsync_server.engine.outcome import Cause
from weightsync_server.engine.rollout import roll_out, switch_together

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.engine_set import EngineSet
    from weightsync_server.fleet_host.serving_gate import ServingGate

__all__ = ["HostCutover"]


class HostCutover:
    """Has the engines from `prepare` until its end, in a task of its own.

    Args:
        record: The version.
        engines: Which take it.
        gate: Shut as soon as they are taken; whoever ends this opens it.
        prepare_s: The longest wait for an engine that cannot be asked yet, seconds.
        patience_s: The longest time that the decision may take, seconds.
        spec: How the engines pause; between two steps they do so one after the other, when the
            fleet has decided.
        slots: How many versions memory holds at once.

    Attributes:
        record: As given.
        patience_s: As given.
    """

    def __init__(
        self,
        record: VersionRecord,
        engines: EngineSet,
        gate: ServingGate,
        prepare_s: float,
        patience_s: float,
        spec: PauseSpec,
        slots: int,
    ) -> None:
        self.record, self.patience_s = record, patience_s
        self._engines, self._gate, self._prepare_s = engines, gate, prepare_s
        self._spec, self._slots = spec, slots
        self._prepared, self._going, self._still = (asyncio.Event() for _ in range(3))
        self._dropped = False
        self._word: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def stands_still(self) -> bool:
        """Whether generation may have stopped for it."""
        return self._going.is_set()

    async def prepare(self) -> None:
        """Return when every rank has the version ready, while the live one is served.

        Raises:
            WeightSyncError: As the engines say; `close` must follow.
        """
        self._task = asyncio.create_task(self._run(), name=f"host cutover {self.record.version}")
        await self._reach(self._prepared)

    async def pause(self) -> None:
        """Return when all engines stand still, with the version in place and proved.

        Raises:
            WeightSyncError: APPLY_RESTORED: all serve what they served. Any other: an engine does
                not, and is brought there; or nothing would stand still.
        """
        if self._between:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "engines that change between two steps do not stand still; use another pause mode",
            )
        self._going.set()
        await self._reach(self._still)

    async def commit(self) -> None:
        """Return when all engines serve it.

        Raises:
            WeightSyncError: As `pause`, and of an engine that did not resume.
        """
        if not self._word.done():
            self._word.set_result(None)
        self._going.set()
        await self._ended()

    async def call_off(self) -> None:
        """Return when all engines serve what they served before.

        Raises:
            WeightSyncError: One does not.
        """
        self._refuse("the fleet has decided against it")
        try:
            await self._ended()
        except WeightSyncError as error:
            if error.reason is not Reason.APPLY_RESTORED:
                raise

    async def close(self) -> None:
        """Let go of the engines as they are: those that stand still are left to be reconciled."""
        self._dropped = not self.stands_still
        if self._dropped and self._prepared.is_set():
            # By itself, so that no engine counts as interrupted.
            self._going.set()
            await self._ended()
        elif self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        # What waits in a task of the cutover's own goes to no engine any more.
        self._refuse("the host does not wait for its fleet any longer")

    async def given(self) -> None:
        """Wait for the fleet, as `Consent`."""
        self._still.set()
        await self._word

    @property
    def _between(self) -> bool:
        return self._spec.mode == BETWEEN_STEPS

    def _refuse(self, reason: str) -> None:
        if not self._word.done():
            self._word.set_exception(WeightSyncError(Reason.APPLY_RESTORED, reason))
            # Nobody may wait for it.
            self._word.exception()

    async def _run(self) -> None:
        group = EngineGroup(secrets.token_hex(8), whole=self._engines.several)
        taken = take_engines(self._engines.named(""), group, None, self._prepare_s)
        async with taken:
            # Those that are found to serve from now on wait, and serve what is live afterwards.
            await self._gate.shut()
            differing = [
                one
                for one in group.members
                if one.live.record.content_digest != self.record.content_digest
            ]
            going = differing or group.members
            check_members(going, self._spec, fences=not self._between)
            if self._between and len(going) > 1:
                check_rolling_slots(self._slots)
            targets = await prepare_all(going, self.record, None, self._spec, durable=True)
            self._prepared.set()
            await self._going.wait()
            if self._dropped:
                await drop_all(going, targets)
                return
            plans = plans_for(going, targets, self._spec, Cause())
            if self._between:
                await roll_out(plans, 1, self._engines.host_journal)
            else:
                await switch_together(plans, self._engines.host_journal, self)
            named = {one.member.name: one.plan for one in plans}
            await self._engines.host_journal.done(named, Answer())

    async def _reach(self, point: asyncio.Event) -> None:
        """Return when the task has come to a point.

        Raises:
            WeightSyncError: It has ended before.
        """
        reached = asyncio.create_task(point.wait())
        try:
            await self._first(reached)
        finally:
            reached.cancel()
        if not point.is_set():
            await self._ended()
            raise WeightSyncError(Reason.FAULT, "a cutover ended early; the server's log tells why")

    async def _first(self, reached: asyncio.Task[bool]) -> None:
        if self._task is not None:
            await asyncio.wait({reached, self._task}, return_when=asyncio.FIRST_COMPLETED)

    async def _ended(self) -> None:
        if self._task is None:
            return
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise WeightSyncError(Reason.CANCELLED, "the cutover was given up")
        self._task.result()
