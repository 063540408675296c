"""What engines of one host share, with limits on applies and on serving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from weightsync.engine import LIMITS_SERVING, CacheUse, Engine, EngineInfo, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentServer
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine.apply_history import DEFAULT_LIMIT, ApplyHistory
from weightsync_server.model import Model
from weightsync_server.nodes import NodeGroup
from weightsync_server.ops.metrics import Metrics
from weightsync_server.ops.settings_group import setting

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


async def answered(call: Awaitable[_T], seconds: float, what: str) -> _T:
    """Return what a call returns in so many seconds, else ENGINE_AWAY that names it as `what`."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError:
        # Not known whether it was done: the ranks are asked before anything else.
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"vLLM did not answer a {what} within {seconds:g} s; check its log, then apply again",
        ) from None


@dataclass(frozen=True)
class ApplySettings:
    """Settings of applies, and of the transactions in which a trainer writes."""

    prepare_timeout_s: float = setting(300, "Longest prepare of an apply, in seconds.", gt=0)
    commit_timeout_s: float = setting(
        60, "Longest commit of an apply, in seconds; then the engine is fenced.", gt=0
    )
    pause_lease_s: float = setting(
        15,
        "Seconds after which a pause ends by itself if this server is gone, and within which vLLM "
        "must pause and resume; longer than its longest step.",
        gt=0.5,
    )
    in_place_pause_s: float = setting(
        60,
        "Longest pause of an engine while a trainer writes its memory, whatever lease renewals it "
        "sends, in seconds; then the previous version is restored.",
        gt=0,
    )
    read_ahead: bool = setting(
        True,
        "Let GPUs read the shards of a version as they arrive, so that its apply has little left "
        "to do; false: each version is read at its apply.",
    )
    history: int = setting(
        DEFAULT_LIMIT,
        "Applies that `weightsync applies` can list, in state_dir/applies.jsonl; the oldest go "
        "first.",
        name="apply_history",
        ge=1,
        le=10_000,
    )


#: How long the time that an engine was given is left as it is, at most and at least; seconds.
_SELDOM_S, _OFTEN_S = 0.5, 0.05
#: In how many parts what is left of it is used up before that.
_PARTS = 4


@dataclass
class ServingTime:
    """What the engines of a host are given.

    Attributes:
        left_s: Returns the seconds that are left from now on (0 or less: none), or None when that
            is unknown: engines then keep the time that they have. Without it engines may serve for
            ever.
        begins_s: Returns for how many seconds from now on an engine may begin to serve a version
            (None as the argument: what vLLM itself has loaded), or None for no limit until it is
            called again. Raises ENGINE_AWAY if the engine may not. Without it no permission is
            needed.
    """

    left_s: Callable[[], float | None] | None = None
    begins_s: Callable[[VersionRecord | None], float | None] | None = None

    def permitted_s(self, record: VersionRecord | None) -> float | None:
        """Return for how long an engine may begin to serve a version; None: it is not limited.

        `record` None stands for what vLLM itself has loaded. ENGINE_AWAY: it may not.
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
        still as it was. The engine stands still under `lease_id`, which nothing else renews; ""
        means under no lease. `longest_s` is the longest wait for an answer.

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
                "the permission to serve ran out before the engine had resumed; the server asks "
                "its fleet again",
                retry_after_s=1.0,
            )
        yield lease_id

    @staticmethod
    @contextlib.asynccontextmanager
    async def _paused(engine: Engine, lease_s: float, longest_s: float) -> AsyncIterator[str]:
        """Have a lease on an engine that stands still for another reason."""
        pause = engine.pause(PauseSpec(cache=CacheUse.KEEP), lease_s)
        lease = await answered(pause, longest_s, "pause")
        try:
            yield lease.lease_id
        except BaseException:
            with contextlib.suppress(WeightSyncError):
                await engine.fence("it was not allowed to serve what it holds")
            raise

    def check(self, engine: str, info: EngineInfo) -> EngineInfo:
        """Return what an engine has said; warn if it cannot be limited although it must."""
        if self.left_s is None or LIMITS_SERVING in info.capabilities:
            return info
        warning = (
            "the plugin in vLLM does not support max_age_s, so it keeps serving when this server "
            "is dead or frozen; install the same weightsync release on both sides"
        )
        logger.warning("engine %s: %s", engine, warning)
        return replace(info, warnings=(*info.warnings, warning))


class LimitRenewal:
    """Gives one engine, once it has said hello, its time again, whoever else has it meanwhile."""

    def __init__(self, engine: Engine, time: ServingTime) -> None:
        self._engine, self._time = engine, time
        self._task = asyncio.create_task(self._run(), name="serving time")

    def stop(self) -> None:
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


@dataclass(frozen=True)
class EngineContext:
    """What all engines of this host share: the model that they serve, and the server's side.

    `fleet` names the fleet that this host is a member of, which alone makes versions live then; ""
    means none. The holder of `joining` decides what the engines serve: an apply of all of them, to
    its end, or an engine that is found to hold a version, while it begins to serve it.
    """

    model: Model
    segments: SegmentServer
    metrics: Metrics
    limits: ApplySettings
    fleet: str = ""
    joining: asyncio.Lock = field(default_factory=asyncio.Lock)
    serving_time: ServingTime = field(default_factory=ServingTime)
    history: ApplyHistory = field(default_factory=ApplyHistory)

    @cached_property
    def nodes(self) -> NodeGroup:
        """The servers of other nodes that have joined this one."""
        return NodeGroup(self.segments)

    @property
    def slots(self) -> int:
        """How many versions memory holds at once."""
        return len(self.model.slots.slots)
