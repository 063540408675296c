"""A host from the commit until the version is staged: learn, read, patch, digest."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from random import Random

import simpy

from benchmarks.fleet.queues import Link
from benchmarks.fleet.scenarios import Scenario
from benchmarks.fleet.store_model import Read, SimulatedStore

__all__ = ["Host", "make_hosts", "stage", "staging_work_s"]


@dataclass
class Host:
    """One host with one engine; times are seconds after the commit, infinite for never.

    Attributes:
        number: Its place in the fan-out of watches.
        slowness: How many times as long as measured its work takes.
        dies_at: When it is lost.
        lapses_at: When its lease is.
        staged_at: When the version is staged and proved.
        received_bytes: Of the payload.
        paused_at: When its engine stopped.
        live_at: When its engine went on with the version.
    """

    number: int
    slowness: float = 1.0
    dies_at: float = math.inf
    lapses_at: float = math.inf
    staged_at: float = math.inf
    received_bytes: float = 0.0
    paused_at: float = math.inf
    live_at: float = math.inf


def make_hosts(scenario: Scenario, random: Random) -> list[Host]:
    """Return hosts as fast as chance has it, and those that will die."""
    constants = scenario.constants
    hosts = []
    for number in range(scenario.hosts):
        slowness = random.lognormvariate(0, constants.host_sigma)
        slow = random.random() < constants.slow_share
        hosts.append(Host(number, slowness * (constants.slow_factor if slow else 1)))
    for host in random.sample(hosts, scenario.deaths):
        host.dies_at = random.uniform(0, scenario.death_window_s)
        renewed = random.uniform(0, constants.lease_s / constants.lease_renewals)
        host.lapses_at = host.dies_at + constants.lease_s - renewed
    return hosts


def staging_work_s(scenario: Scenario) -> float:
    """Return the seconds that a usual host's fetchers work on what it has read."""
    constants, payload = scenario.constants, scenario.payload
    patches = constants.patches * constants.patch_over_memcpy if payload.delta else 0
    one_thread = payload.version_bytes / constants.memcpy_bytes_per_s
    threads = 1 if constants.fetchers == 1 else constants.fetchers * constants.threads_gain
    return one_thread * (patches + constants.digest_over_memcpy) / threads


def stage(
    env: simpy.Environment,
    host: Host,
    scenario: Scenario,
    store: SimulatedStore,
    shared: Sequence[Read],
    random: Random,
) -> Generator[simpy.Event, None, None]:
    """Learn of the commit, read, and set `staged_at`; a host that dies does not get so far."""
    constants = scenario.constants
    yield env.timeout(_learns_after(host, scenario, random))
    most = constants.jitter_delta_s if scenario.payload.delta else constants.jitter_full_s
    yield env.timeout(random.uniform(0, most))
    # The commit record names the manifest, which names the objects.
    for _ in range(2):
        yield env.timeout(store.first_byte())
    # Each host begins somewhere else, so that not all ask for the same object.
    waiting = random.sample(shared, len(shared))
    nic = Link(constants.nic_bytes_per_s)
    readers = range(int(constants.readers))
    yield env.all_of([env.process(_reader(env, host, store, waiting, nic)) for _ in readers])
    yield env.timeout(staging_work_s(scenario) * host.slowness)
    if env.now < host.dies_at:
        host.staged_at = env.now


def _reader(
    env: simpy.Environment, host: Host, store: SimulatedStore, waiting: list[Read], nic: Link
) -> Generator[simpy.Event, None, None]:
    while waiting and env.now < host.dies_at:
        read = waiting.pop()
        yield from store.read(read, nic)
        host.received_bytes += read.size


def _learns_after(host: Host, scenario: Scenario, random: Random) -> float:
    constants = scenario.constants
    if not scenario.watch:
        return random.uniform(0, constants.poll_s)
    return constants.put_s + constants.watch_first_s + host.number * constants.watch_step_s
