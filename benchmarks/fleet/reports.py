"""What a coordinator waits for."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable

import simpy

from benchmarks.fleet.host_model import Host

__all__ = ["Reports"]


class Reports:
    """Complete when every member has reported, or its lease has run out.

    Args:
        env: The simulation.
        members: Who is to report.

    Attributes:
        complete: The event.
        lost: Members whose lease ran out before they had reported.
    """

    def __init__(self, env: simpy.Environment, members: Iterable[Host]) -> None:
        self.complete = env.event()
        self.lost: list[int] = []
        self._env = env
        self._missing = set[int]()
        for host in members:
            self._missing.add(host.number)
            if math.isfinite(host.lapses_at):
                env.process(self._lapse(host))

    def add(self, number: int) -> None:
        """Take a member's report."""
        self._missing.discard(number)
        if not self._missing and not self.complete.triggered:
            self.complete.succeed()

    def _lapse(self, host: Host) -> Generator[simpy.Event, None, None]:
        yield self._env.timeout(max(0.0, host.lapses_at - self._env.now))
        if host.number in self._missing:
            self.lost.append(host.number)
            self.add(host.number)
