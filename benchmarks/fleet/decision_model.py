"""From a plan to live hosts: prepared, paused, one decision, done; or a decision for each wave."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from random import Random

import simpy

from benchmarks.fleet.host_model import Host
from benchmarks.fleet.register_model import SimulatedRegister
from benchmarks.fleet.reports import Reports
from benchmarks.fleet.scenarios import Scenario

__all__ = ["Decision", "FleetApply"]

_Steps = Generator[simpy.Event, None, None]


@dataclass(frozen=True)
class Decision:
    """What was created in the register.

    Attributes:
        at: Seconds after the commit.
        members: Numbers of the hosts that it is about.
        commit: COMMIT, else ABORT.
    """

    at: float
    members: frozenset[int]
    commit: bool


class FleetApply:
    """Makes a version live on a fleet; the plan is created with the commit.

    Args:
        env: A simulation whose time 0 is the commit.
        scenario: Its figures, and what happens when members die.
        hosts: Staged by a run of their own; `paused_at` and `live_at` are set here.
        random: For the register.

    Attributes:
        decisions: In order.
    """

    def __init__(
        self, env: simpy.Environment, scenario: Scenario, hosts: Sequence[Host], random: Random
    ) -> None:
        self.decisions: list[Decision] = []
        self._env = env
        self._scenario = scenario
        self._hosts = hosts
        self._register = SimulatedRegister(env, scenario.constants, random)

    def barrier(self) -> _Steps:
        """All prepare, all pause, one decision, all go on."""
        prepared, ready, done = (Reports(self._env, self._hosts) for _ in range(3))
        pause, decided = self._env.event(), self._env.event()
        yield from self._register.put()
        for host in self._hosts:
            self._env.process(self._join(host, (prepared, ready, done), pause, decided))
        yield prepared.complete
        yield from self._register.put()
        pause.succeed()
        yield ready.complete
        yield from self._decide(self._hosts, commit=self._goes_on(prepared, ready))
        decided.succeed()

    def rolling(self) -> _Steps:
        """All prepare, then each wave pauses, writes and goes on by a decision of its own."""
        yield from self._register.put()
        prepared = [Reports(self._env, [host]) for host in self._hosts]
        for host, report in zip(self._hosts, prepared, strict=True):
            self._env.process(self._prepare(host, report))
        size = self._scenario.max_unavailable
        for first in range(0, len(self._hosts), size):
            members = self._hosts[first : first + size]
            reports = prepared[first : first + size]
            yield self._env.all_of([report.complete for report in reports])
            if not self._goes_on(*reports):
                yield from self._go_back()
                return
            yield from self._decide(members, commit=True)
            done = Reports(self._env, members)
            for host in members:
                self._env.process(self._follow(host, done))
            yield done.complete
            if not self._goes_on(done):
                yield from self._go_back()
                return

    def _go_back(self) -> _Steps:
        """Undo the waves before: no host is live on the version then, how soon is not counted."""
        yield from self._decide(self._hosts, commit=False)
        for host in self._hosts:
            host.live_at = math.inf

    def _join(
        self,
        host: Host,
        reports: tuple[Reports, Reports, Reports],
        pause: simpy.Event,
        decided: simpy.Event,
    ) -> _Steps:
        prepared, ready, done = reports
        yield from self._prepare(host, prepared)
        yield from self._learn(host, pause)
        yield from self._stop(host)
        yield from self._report(host, ready)
        yield from self._learn(host, decided)
        if self.decisions[0].commit:
            yield from self._switch(host)
            yield from self._report(host, done)

    def _follow(self, host: Host, done: Reports) -> _Steps:
        yield from self._register.spread(host.number)
        yield from self._stop(host)
        yield from self._switch(host)
        yield from self._report(host, done)

    def _decide(self, members: Sequence[Host], *, commit: bool) -> _Steps:
        yield from self._register.put()
        numbers = frozenset(host.number for host in members)
        self.decisions.append(Decision(self._env.now, numbers, commit))

    def _goes_on(self, *reports: Reports) -> bool:
        return self._scenario.go_on or not any(report.lost for report in reports)

    def _learn(self, host: Host, event: simpy.Event) -> _Steps:
        yield event
        yield from self._register.spread(host.number)

    def _prepare(self, host: Host, prepared: Reports) -> _Steps:
        if math.isinf(host.staged_at):
            return
        constants, payload = self._scenario.constants, self._scenario.payload
        yield from self._register.spread(host.number)
        yield self._env.timeout(max(0.0, host.staged_at - self._env.now))
        prefetch_s = payload.version_bytes / payload.ranks / constants.prefetch_bytes_per_s
        yield self._env.timeout((prefetch_s + constants.prepare_s) * host.slowness)
        yield from self._report(host, prepared)

    def _stop(self, host: Host) -> _Steps:
        host.paused_at = self._env.now
        yield self._env.timeout(self._scenario.constants.stop_s * host.slowness)

    def _switch(self, host: Host) -> _Steps:
        constants = self._scenario.constants
        delta = self._scenario.payload.delta
        seconds = constants.switch_delta_s if delta else constants.switch_full_s
        yield self._env.timeout(seconds * host.slowness)
        if self._env.now < host.dies_at:
            host.live_at = self._env.now

    def _report(self, host: Host, reports: Reports) -> _Steps:
        """Create a record that the coordinator then sees; the dead create none."""
        if self._env.now < host.dies_at:
            yield from self._register.put()
            yield from self._register.spread(0)
            reports.add(host.number)
