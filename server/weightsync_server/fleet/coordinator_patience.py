"""How long a coordinator waits: for all of a wave, for those that stand still, for who is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync import clock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync_server.fleet.fleet_history import Apply
    from weightsync_server.fleet.fleet_limits import FleetLimits

__all__ = ["Patience"]


class Patience:
    """Waits for one apply, by the clock of this process.

    Args:
        limits: How long.
    """

    def __init__(self, limits: FleetLimits) -> None:
        self._limits = limits
        self._step, self._begun, self._paused_at = 1, clock.monotonic(), 0.0
        self._missed: dict[str, float] = {}

    def is_over(self, apply: Apply) -> bool:
        """Tell whether nobody is waited for any more.

        Args:
            apply: As last read.
        """
        now = clock.monotonic()
        if apply.step != self._step:
            # Each wave has its time.
            self._step, self._begun = apply.step, now
        if apply.pause and not self._paused_at:
            self._paused_at = now
        # Before the members' own limit, which would fence them.
        paused_too_long = self._paused_at and now >= self._paused_at + self._limits.undecided_s / 2
        return bool(paused_too_long) or now >= self._begun + self._limits.prepare_s

    def gone(self, members: Iterable[str], present: Iterable[str]) -> frozenset[str]:
        """Return the members that were missed at each look for the time of grace.

        Args:
            members: Those of the apply.
            present: Those that are in the register now.
        """
        now = clock.monotonic()
        missing = frozenset(members) - frozenset(present)
        self._missed = {name: self._missed.get(name, now) for name in missing}
        return frozenset(
            name for name, since in self._missed.items() if now >= since + self._limits.grace_s
        )

    def forget(self) -> None:
        """Miss nobody any more: a register that does not answer says nothing about members."""
        self._missed.clear()
