"""A store that many hosts read: request rates, time to the first byte, and its links."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from random import Random

import simpy

from benchmarks.fleet.queues import Link, RequestRate
from benchmarks.fleet.scenarios import Scenario, StoreKind

__all__ = ["Read", "SimulatedStore", "reads"]


@dataclass(frozen=True)
class Read:
    """Ranges that one fetcher reads one behind the other: one event in place of one for each.

    Attributes:
        size: Bytes of all ranges.
        ranges: How many GETs.
        partition: The part of the store where they lie.
    """

    size: float
    ranges: int
    partition: int


def reads(scenario: Scenario, random: Random, at_most: int = 16) -> list[Read]:
    """Return what every host reads: objects, joined so that no host makes more than `at_most`."""
    constants, payload = scenario.constants, scenario.payload
    objects = payload.objects(constants)
    size = payload.read_bytes / objects
    ranges = objects * math.ceil(size / constants.range_bytes)
    count = min(objects, at_most)
    each = [ranges // count + (index < ranges % count) for index in range(count)]
    return [
        Read(payload.read_bytes * gets / ranges, gets, random.randrange(scenario.partitions))
        for gets in each
    ]


class SimulatedStore:
    """Serves reads, and answers 503 beyond the rate of a prefix.

    Args:
        env: The simulation.
        scenario: Which store.
        random: For latencies and pauses.

    Attributes:
        sent_bytes: That have left it, whole reads alone.
        refused: How often it answered 503.
    """

    def __init__(self, env: simpy.Environment, scenario: Scenario, random: Random) -> None:
        self.sent_bytes = 0.0
        self.refused = 0
        self._env = env
        self._random = random
        self._constants = constants = scenario.constants
        rate, self._first_byte_s = {
            StoreKind.S3: (math.inf, constants.s3_first_byte_s),
            StoreKind.OWN: (constants.own_store_bytes_per_s, constants.own_store_first_byte_s),
            StoreKind.ORIGIN: (constants.origin_bytes_per_s, constants.origin_first_byte_s),
        }[scenario.store]
        self._link = Link(rate)
        gets, burst = constants.s3_gets_per_s, constants.s3_gets_per_s * constants.s3_burst_s
        limited = scenario.store is StoreKind.S3
        self._partitions = [RequestRate(gets, burst) for _ in range(scenario.partitions * limited)]

    def read(self, read: Read, nic: Link) -> Generator[simpy.Event, None, None]:
        """Read: admitted, first byte, then as fast as store, host and one stream allow."""
        env, constants = self._env, self._constants
        pause = constants.backoff_s
        while not self._admits(read):
            self.refused += 1
            yield env.timeout(pause)
            pause = self._random.uniform(constants.backoff_s, 2 * pause)
            pause = min(pause, constants.backoff_most_s)
        yield env.timeout(self.first_byte() * math.ceil(read.ranges / constants.reads_at_once))
        ends = (
            self._link.send(env.now, read.size),
            nic.send(env.now, read.size),
            env.now + read.size / constants.stream_bytes_per_s,
        )
        yield env.timeout(max(ends) - env.now)
        self.sent_bytes += read.size

    def first_byte(self) -> float:
        """Return the seconds to a first byte."""
        if not self._first_byte_s:
            return 0.0
        median = math.log(self._first_byte_s)
        return self._random.lognormvariate(median, self._constants.first_byte_sigma)

    def _admits(self, read: Read) -> bool:
        if not self._partitions:
            return True
        return self._partitions[read.partition].admit(self._env.now, read.ranges)
