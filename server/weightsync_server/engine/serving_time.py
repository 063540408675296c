"""For how long an engine may serve without another word of this server, which may be gone."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightsync.engine import LIMITS_SERVING
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.engine import Engine, EngineInfo

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
    """

    left_s: Callable[[], float | None] | None = None

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
