"""What operators see of a member; a server that is in no fleet has none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync import clock
from weightsync_server.fleet.member_steps import Mode

if TYPE_CHECKING:
    from weightsync_server.fleet.fleet_history import History
    from weightsync_server.fleet.fleet_member import FleetMember
    from weightsync_server.ops.metrics import Metrics

__all__ = ["FleetMetrics"]


class FleetMetrics:
    """Gauges of one member, read when they are scraped.

    Args:
        metrics: The server's.
        member: Of the fleet.

    Attributes:
        members: How many the register had when they were counted last.
    """

    def __init__(self, metrics: Metrics, member: FleetMember) -> None:
        self._member = member
        self._decided: tuple[tuple[int, int], float] = ((0, 0), 0.0)
        self.members = 0
        metrics.track(
            "weightsync_fleet_members",
            "Members that the fleet's register has, as this one counted them last.",
            lambda: self.members,
        )
        metrics.track(
            "weightsync_fleet_skew",
            "Commits of the fleet that this member's engines have not followed.",
            self._skew,
        )
        metrics.track(
            "weightsync_fleet_undecided",
            "1 while this member serves nothing because it does not know what is decided.",
            self._undecided,
        )
        metrics.track(
            "weightsync_fleet_decision_age_seconds",
            "Time since this member read the fleet's newest decision; 0: it has read none.",
            self._age,
        )

    def look(self) -> None:
        """Take note of when a decision was read first."""
        newest = _newest(self._member.view.history)
        if newest != self._decided[0]:
            self._decided = newest, clock.monotonic()

    def _skew(self) -> float:
        history, live = self._member.view.history, self._member.host.live()
        if history is None or history.target in (None, live):
            return 0.0
        return float(len(history.missed(live)))

    def _undecided(self) -> float:
        state = self._member.state
        waits = self._member.view.why or self._member.view.history is None
        return float(state.mode is Mode.PAUSED or (state.mode is Mode.FENCED and bool(waits)))

    def _age(self) -> float:
        self.look()
        newest, since = self._decided
        return clock.monotonic() - since if newest[1] else 0.0


def _newest(history: History | None) -> tuple[int, int]:
    """Return the number of the newest apply that has a decision, and how many it has."""
    applies = history.applies if history is not None else ()
    found = [(one.plan.number, len(one.decisions)) for one in applies if one.decisions]
    return found[-1] if found else (0, 0)
