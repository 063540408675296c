"""For how long an engine may serve without another word of this server, which may be gone.

And whether it may begin to: what the fleet of its host lets it, where that has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightsync.engine import LIMITS_SERVING, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.engine_calls import answered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from weightsync.engine import Engine, EngineInfo
    from weightsync_server.catalog.record import VersionRecord

__all__ = ["LimitRenewal", "ServingTime"]

logger = logging.getLogger(__name__)

#: How long the time that an engine was given is left as it is, at most and at least; seconds.
_SELDOM_S, _OFTEN_S = 0.5, 0.05
#: In how many parts what is left of it is used up before that.
_PARTS = 4


@dataclass
class ServingTime:
    """What the engines of a host are given.

    Attributes:
        left_s: Returns the seconds that are left from now on, 0 or less: none; None: nobody knows,
            and engines keep the time that they have. None itself: engines may serve for ever.
        begins_s: Returns for how many seconds from now on an engine may begin to serve a version
            (None: what vLLM itself has loaded), None: until it is asked again; raises ENGINE_AWAY
            where it may not. None itself: nobody has to be asked.
    """

    left_s: Callable[[], float | None] | None = None
    begins_s: Callable[[VersionRecord | None], float | None] | None = None

    def permitted_s(self, record: VersionRecord | None) -> float | None:
        """Return for how long an engine may begin to serve a version; None: it is not limited.

        Args:
            record: The version; None: what vLLM itself has loaded.

        Raises:
            WeightSyncError: ENGINE_AWAY; it may not.
        """
        return self.begins_s(record) if self.begins_s is not None else None

    @contextlib.asynccontextmanager
    async def leased(
        self,
        engine: Engine,
        lease_id: str,
        record: VersionRecord | None,
        lease_s: float,
        longest_s: float,
    ) -> AsyncIterator[str]:
        """Yield a lease to resume with, which ends before the permission for that can.

        A server that stands still after it was permitted finds the lease gone, and the engine as
        still as it was.

        Args:
            engine: The engine.
            lease_id: Under which it stands still, renewed by nobody else; "": under none.
            record: What it is to serve.
            lease_s: How long a lease may be.
            longest_s: The longest wait for an answer.

        Raises:
            WeightSyncError: As `permitted_s`. Of the engine: the lease is gone already.
        """
        if not lease_id:
            async with (
                self._paused(engine, lease_s, longest_s) as fresh,
                self.leased(engine, fresh, record, lease_s, longest_s),
            ):
                yield fresh
            return
        # Half of the time is left for the way to the engine.
        lease_s = min(lease_s, (self.permitted_s(record) or 0.0) / 2)
        await answered(engine.renew(lease_id, lease_s), longest_s, "renewal")
        if (self.permitted_s(record) or 0.0) < lease_s:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "the engine was not let serve in time; it is asked again what it may",
                retry_after_s=1.0,
            )
        yield lease_id

    @staticmethod
    @contextlib.asynccontextmanager
    async def _paused(engine: Engine, lease_s: float, longest_s: float) -> AsyncIterator[str]:
        """Have a lease on an engine that stands still for another reason."""
        pause = engine.pause(PauseSpec(clear_cache=False), lease_s)
        lease = await answered(pause, longest_s, "pause")
        try:
            yield lease.lease_id
        except BaseException:
            with contextlib.suppress(WeightSyncError):
                await engine.fence("it was not let serve what it holds")
            raise

    def check(self, engine: str, info: EngineInfo) -> EngineInfo:
        """Return what an engine has said, with a warning if it cannot be limited although it must.

        Args:
            engine: Its name.
            info: What it said.
        """
        if self.left_s is None or LIMITS_SERVING in info.capabilities:
            return info
        warning = (
            "the plugin in vLLM does not know max_age_s, so that it serves on when this server is "
            "dead or frozen; install the same weightsync release on both sides"
        )
        logger.warning("engine %s: %s", engine, warning)
        return replace(info, warnings=(*info.warnings, warning))


class LimitRenewal:
    """Gives one engine its time again and again, whoever else has the engine meanwhile.

    Args:
        engine: The engine, which has said hello.
        time: What it is given.
    """

    def __init__(self, engine: Engine, time: ServingTime) -> None:
        self._engine, self._time = engine, time
        self._task = asyncio.create_task(self._run(), name="serving time")

    def stop(self) -> None:
        """Give it no more."""
        self._task.cancel()

    async def renew(self) -> float:
        """Give it what is left now, as before it begins to serve; return when to do so again."""
        left_s = self._time.left_s
        seconds = left_s() if left_s is not None else None
        if seconds is None:
            return _SELDOM_S
        await self._give(seconds)
        return min(max(seconds / _PARTS, _OFTEN_S), _SELDOM_S) if seconds > 0 else _SELDOM_S

    async def _run(self) -> None:
        if self._time.left_s is None:
            # A member of a fleet may have had the engine before, which this server is not.
            while not await self._give(None):  # noqa: ASYNC110 - an engine is asked
                await asyncio.sleep(_SELDOM_S)
            return
        while True:
            pause_s = await self.renew()
            await asyncio.sleep(pause_s)

    async def _give(self, seconds: float | None) -> bool:
        """Return whether the engine has it."""
        try:
            await self._engine.serve_for(seconds)
        except WeightSyncError:
            # Who watches the engine sees that it does not answer.
            return False
        return True
