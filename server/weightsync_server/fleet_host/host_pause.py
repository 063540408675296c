"""A pause of all engines of this host that hold already what their fleet goes to."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from weightsync.engine import OpenApply, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.engine_group import EngineGroup, take_engines

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.engine_group import GroupMember
    from weightsync_server.engine.engine_set import EngineSet
    from weightsync_server.fleet_host.serving_gate import ServingGate

__all__ = ["HostPause"]


class HostPause:
    """Stands between a host and its fleet as a `HostCutover` does, and writes nothing.

    Requests wait in vLLM meanwhile, and none is refused. An engine whose lease runs out is fenced,
    as in every pause that others decide the end of.

    Args:
        record: What the engines hold.
        engines: They.
        gate: Shut as soon as they are taken; whoever ends this opens it.
        prepare_s: The longest wait for an engine that cannot be asked yet, seconds.

    Attributes:
        record: As given.
        stands_still: Whether generation may have stopped for it.
    """

    def __init__(
        self, record: VersionRecord, engines: EngineSet, gate: ServingGate, prepare_s: float
    ) -> None:
        self.record = record
        self.stands_still = False
        self._engines, self._gate, self._prepare_s = engines, gate, prepare_s
        self._running = 0
        self._still, self._word = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def pause(self) -> None:
        """Return when all engines stand still.

        Raises:
            WeightSyncError: One does not; those that did go on, or are brought there.
        """
        self.stands_still = True
        self._task = asyncio.create_task(self._run(), name=f"host pause {self.record.version}")
        still = asyncio.create_task(self._still.wait())
        await asyncio.wait({still, self._task}, return_when=asyncio.FIRST_COMPLETED)
        still.cancel()
        if self._task.done():
            await self.commit()

    async def commit(self) -> None:
        """Return when all engines serve what they hold.

        Raises:
            WeightSyncError: One does not.
        """
        self._word.set()
        if self._task is not None:
            await asyncio.wait({self._task})
            if self._task.cancelled():
                raise WeightSyncError(Reason.CANCELLED, "the pause was given up")
            self._task.result()

    async def call_off(self) -> None:
        """As `commit`: what was decided is not what they do not hold."""
        await self.commit()

    async def close(self) -> None:
        """Let go of the engines as they are: those that stand still are left to be reconciled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        group = EngineGroup(secrets.token_hex(8), whole=self._engines.several)
        taken = take_engines(self._engines.named(""), group, None, self._prepare_s)
        async with taken:
            # Those that are found to serve from now on wait, and serve what is live afterwards.
            await self._gate.shut()
            for one in group.members:
                one.session.check_fences()
                if one.live.record.content_digest != self.record.content_digest:
                    raise WeightSyncError(
                        Reason.ENGINE_AWAY,
                        f"engine {one.name} serves another version than this host said",
                    )
            self._running = len(group.members)
            await _all(self._stand(one, group.apply_id) for one in group.members)

    async def _stand(self, member: GroupMember, apply_id: str) -> None:
        live = member.live.record.version
        open_apply = OpenApply(apply_id, live, live)
        try:
            async with member.session.paused(PauseSpec(clear_cache=False), open_apply):
                self._running -= 1
                if not self._running:
                    self._still.set()
                await self._word.wait()
                await member.session.resume(member.live)
        except WeightSyncError as error:
            member.error = error
            # The others do not wait for one that does not stand, or does not go on.
            self._word.set()
            raise


async def _all(parts: Iterable[Coroutine[None, None, None]]) -> None:
    """Wait for all of them, and raise the first failure."""
    outcomes = await asyncio.gather(*parts, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
