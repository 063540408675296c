"""The lease of a pause: whoever paused an engine and does not come back loses it."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.engine import OnExpiry
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.engine import OpenApply, PauseSpec

__all__ = ["MAX_LEASE_S", "PauseLease"]

#: Longest lease; a server that wants more renews.
MAX_LEASE_S = 3600.0


class PauseLease:
    """At most one lease, which runs out by itself.

    One that has run out cannot be prolonged any more, also when this process, or its whole host,
    stood still meanwhile and hears of both at once.

    Args:
        on_end: Called with the id of a lease that has run out; it stays the present one until
            `drop`.

    Attributes:
        id: The present lease; empty: none.
        on_expiry: What is to be done when it runs out.
        open_apply: That of the last pause with FENCE; None: there was none, or it is decided.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self.id = ""
        self.on_expiry = OnExpiry.RESUME
        self.open_apply: OpenApply | None = None
        self._on_end = on_end
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, seconds: float, spec: PauseSpec) -> str:
        """Begin the lease of a pause and return its id."""
        self.id = secrets.token_hex(8)
        self.on_expiry = spec.on_expiry
        if spec.on_expiry is OnExpiry.FENCE:
            self.open_apply = spec.apply
        self._run(seconds)
        return self.id

    def check(self, lease_id: str) -> None:
        """Raise ENGINE_REFUSED unless this is the present lease and has not run out."""
        if not self.id or lease_id != self.id or clock.boottime() >= self._until:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"lease {lease_id or '(none)'} is not the present one; pause the engine again",
            )

    def renew(self, lease_id: str, seconds: float) -> None:
        """Let a lease run out so many seconds from now.

        Raises:
            WeightSyncError: As `check`.
        """
        self.check(lease_id)
        self._run(seconds)

    def drop(self) -> None:
        """End the lease; nobody is told."""
        self.id = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def settle(self) -> None:
        """End the lease: generation has started, and no apply is open any more."""
        self.drop()
        self.open_apply = None

    def undecided(self) -> str:
        """Return, in one sentence, why an engine is fenced whose pause ran out."""
        apply = self.open_apply
        what = f"apply {apply.apply_id} ({apply.base_version} to {apply.version})" if apply else ""
        return (
            f"the pause of {what or 'an apply'} ran out before it was decided; it serves again "
            "when its weightsync-server is back and says which version is live"
        )

    def _run(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = min(max(seconds, 0.0), MAX_LEASE_S)
        self._until = clock.boottime() + seconds
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._on_end, self.id)
