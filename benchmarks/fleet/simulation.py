"""One run of a fleet's update, the same for the same seed, and many of them side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from random import Random

import simpy

from benchmarks.fleet.decision_model import Decision, FleetApply
from benchmarks.fleet.host_model import Host, make_hosts, stage
from benchmarks.fleet.scenarios import Scenario
from benchmarks.fleet.store_model import SimulatedStore, reads

__all__ = ["Applied", "Run", "Seconds", "seconds_of", "simulate", "simulate_many"]


@dataclass(frozen=True)
class Applied:
    """A version that a fleet was given.

    Attributes:
        hosts: After the last event.
        decisions: In order.
    """

    hosts: Sequence[Host]
    decisions: Sequence[Decision]

    @property
    def live_s(self) -> float:
        """Seconds from the commit until the last host that lives is live; infinite: never."""
        return max(host.live_at for host in self.hosts if math.isinf(host.dies_at))

    @property
    def pause_s(self) -> float:
        """The longest pause of an engine that went live, in seconds; 0 where none did."""
        live = (host for host in self.hosts if math.isfinite(host.live_at))
        return max((host.live_at - host.paused_at for host in live), default=0.0)


@dataclass(frozen=True)
class Run:
    """What one seed came to.

    Attributes:
        staged_s: Seconds from the commit until the last host that lives has staged.
        sent_bytes: That left the store.
        refused: Answers 503.
        barrier: By one decision.
        rolling: In waves, from the same staged hosts.
    """

    staged_s: float
    sent_bytes: float
    refused: int
    barrier: Applied
    rolling: Applied


def simulate(scenario: Scenario, seed: int) -> Run:
    """Run a scenario: bytes once, then both ways to decide, each on the same staged hosts."""
    env = simpy.Environment()
    random = Random(seed)
    hosts = make_hosts(scenario, random)
    store = SimulatedStore(env, scenario, random)
    shared = reads(scenario, random)
    for host in hosts:
        env.process(stage(env, host, scenario, store, shared, random))
    env.run()
    return Run(
        max(host.staged_at for host in hosts if math.isinf(host.dies_at)),
        store.sent_bytes,
        store.refused,
        _apply(scenario, hosts, seed, in_waves=False),
        _apply(scenario, hosts, seed, in_waves=True),
    )


def _apply(scenario: Scenario, staged: Sequence[Host], seed: int, *, in_waves: bool) -> Applied:
    env = simpy.Environment()
    hosts = [dataclasses.replace(host) for host in staged]
    apply = FleetApply(env, scenario, hosts, Random(seed))
    env.process(apply.rolling() if in_waves else apply.barrier())
    env.run()
    return Applied(hosts, apply.decisions)


@dataclass(frozen=True)
class Seconds:
    """What is kept of a run: seconds from the commit, and counts."""

    staged: float
    barrier: float
    rolling: float
    pause: float
    refused: int


def simulate_many(scenario: Scenario, seeds: int, pool: ProcessPoolExecutor) -> list[Seconds]:
    """Return what the seeds 0 to `seeds` - 1 came to, in that order, on all processes of `pool`."""
    return list(pool.map(partial(seconds_of, scenario), range(seeds), chunksize=max(1, seeds // 8)))


def seconds_of(scenario: Scenario, seed: int) -> Seconds:
    """Run one seed and return what is kept of it."""
    run = simulate(scenario, seed)
    return Seconds(
        run.staged_s, run.barrier.live_s, run.rolling.live_s, run.barrier.pause_s, run.refused
    )
