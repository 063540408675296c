"""A member's key, renewed until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NamedTuple, Protocol, Self

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError

__all__ = ["MemberLease", "Membership", "Renewal"]

logger = logging.getLogger(__name__)

#: Of its time, so that two renewals may fail before the third is too late.
_RENEWALS = 3
#: Longest wait for a renewal before the key is removed, seconds.
_QUIET_S = 2.0


class Renewal(NamedTuple):
    """What became of a renewal.

    Attributes:
        seconds: How long the key stays, from when the renewal was asked for.
        kept: It was there as it was; False: it may have been gone, or another's.
    """

    seconds: float
    kept: bool


class MemberLease(Protocol):
    """What a register does for one member."""

    key: str

    async def renew(self) -> Renewal:
        """See that the key is there for another `ttl_s` or more, as it was or anew.

        Raises:
            WeightSyncError: It may not be.
        """

    async def release(self) -> None:
        """Remove the key.

        Raises:
            WeightSyncError: It may still be there until its time is over.
        """


class Membership:
    """Renews a member's key in a task of its own.

    Both times are by `clock.boottime`: they pass also while this process stands still.

    Attributes:
        seen_since: From then on others have seen the key at any time.
        valid_until: They see it at least until then; a member that finds it past, as after it was
            stopped, cannot rely on what it read before.
    """

    def __init__(self, lease: MemberLease, ttl_s: int) -> None:
        if ttl_s < 1:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"a member is to be renewed within {ttl_s} s; give it a second or more",
            )
        self._lease, self._ttl_s = lease, ttl_s
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self.seen_since = self.valid_until = 0.0

    async def start(self) -> Self:
        """Put the key there and begin to renew it.

        Raises:
            WeightSyncError: It cannot be put there.
        """
        await self.renew()
        self._task = asyncio.create_task(self._keep(), name=f"member {self._lease.key}")
        return self

    async def close(self) -> None:
        """Remove the key; where the register does not answer, its time does that."""
        if self._task is None:
            return
        quiet = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_S):
                # A renewal that is under way may come to the register after the removal.
                quiet = await self._turn.acquire()
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        if quiet:
            self._turn.release()
        with contextlib.suppress(WeightSyncError):
            await self._lease.release()

    async def renew(self) -> None:
        """Return when others see the key, for all of its time.

        Raises:
            WeightSyncError: They may not.
        """
        async with self._turn:
            # The register counts from when it is asked, or from later.
            asked = clock.boottime()
            seconds, kept = await self._lease.renew()
            answered = clock.boottime()
            if not kept or answered >= self.valid_until:
                self.seen_since = answered
            self.valid_until = asked + seconds

    def follow(self, before: Membership) -> None:
        """Take note that another of this process had the key until this one has it."""
        if before.valid_until > self.seen_since:
            self.seen_since = min(self.seen_since, before.seen_since)

    def is_seen_since(self, moment: float) -> bool:
        """Return whether others have seen the key all the time from a moment until now."""
        return self.seen_since <= moment and clock.boottime() < self.valid_until

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS)
            try:
                await self.renew()
            except WeightSyncError as error:
                logger.warning("member %s was not renewed: %s", self._lease.key, error)
            except Exception:
                # Whatever it was, the next try may go well, and without one the member is lost.
                logger.exception("member %s was not renewed", self._lease.key)
