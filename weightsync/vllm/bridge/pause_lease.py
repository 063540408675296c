"""The lease of a pause: whoever paused vLLM and does not come back loses it."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from weightsync import clock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_LEASE_S", "PauseLease"]

#: Longest lease; a server that wants more renews.
MAX_LEASE_S = 3600.0


class PauseLease:
    """At most one lease, which runs out by itself.

    One that has run out cannot be prolonged any more, also when this process stood still meanwhile
    and hears of both at once.

    Args:
        on_end: Called with the id of a lease that has run out; it stays the present one until
            `drop`.

    Attributes:
        id: The present lease; empty: none.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.id = ""
        self._on_end = on_end
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, seconds: float) -> str:
        """Begin a lease and return its id."""
        self.id = secrets.token_hex(8)
        self.renew(seconds)
        return self.id

    def holds(self, lease_id: str) -> bool:
        """Return whether this is the present lease and has not run out."""
        return bool(self.id) and lease_id == self.id and clock.monotonic() < self._until

    def renew(self, seconds: float) -> None:
        """Let the present lease run out so many seconds from now."""
        if self._timer is not None:
            self._timer.cancel()
        seconds = min(max(seconds, 0.0), MAX_LEASE_S)
        self._until = clock.monotonic() + seconds
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._on_end, self.id)

    def drop(self) -> None:
        """End the lease; nobody is told."""
        self.id = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
