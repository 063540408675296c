"""What is simulated: payloads, stores, fleets, and the changes that would make them faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from benchmarks.fleet.constants import CONSTANTS, Constants

__all__ = ["PAYLOADS", "WANTED_S", "Payload", "Scenario", "StoreKind", "is_wanted", "scenarios"]

#: A 1 % delta of 15 GB, 1,000 hosts, a barrier, S3: seconds from the commit, p99.
WANTED_S = 3.0

#: More hosts than that are not asked to read from the server that received the push.
_ORIGIN_HOSTS = 10


class StoreKind(Enum):
    """Where hosts read from."""

    S3 = "s3"
    OWN = "own"
    ORIGIN = "origin"


@dataclass(frozen=True)
class Payload:
    """One version as it is read.

    Attributes:
        name: In the figures.
        version_bytes: Of the whole version.
        read_bytes: That a host reads.
        ranks: Ranks of a host's engine, which share the version evenly.
    """

    name: str
    version_bytes: float
    read_bytes: float
    ranks: int = 1

    @property
    def delta(self) -> bool:
        """Whether it is patched into an older version."""
        return self.read_bytes < self.version_bytes

    def objects(self, constants: Constants) -> int:
        """Return how many objects a host reads."""
        if self.delta:
            return math.ceil(self.read_bytes / constants.delta_shard_bytes)
        return math.ceil(self.version_bytes / constants.shard_bytes)


# 1 % of the values of bfloat16, 1.35 bytes for each.
PAYLOADS = (
    Payload("delta15", 15e9, 0.10125e9),
    Payload("full15", 15e9, 15e9),
    Payload("delta140", 140e9, 0.945e9, ranks=8),
    Payload("full140", 140e9, 140e9, ranks=8),
)


@dataclass(frozen=True)
class Scenario:
    """One line of the table.

    Attributes:
        hosts: How many there are, one engine each.
        payload: What they read.
        store: Where from.
        partitions: Parts of the store that each serve the rate of one prefix.
        watch: Hosts learn of a commit by a watch; else they poll.
        deaths: Hosts that die at a random time within `death_window_s` of the commit.
        go_on: Without those that died after the plan; else the decision is ABORT.
        max_unavailable: Hosts of one wave of a rolling apply.
        note: What differs from the first line of its payload.
        constants: The figures.
    """

    hosts: int
    payload: Payload
    store: StoreKind = StoreKind.S3
    partitions: int = 1
    watch: bool = True
    deaths: int = 0
    death_window_s: float = 2.0
    go_on: bool = True
    max_unavailable: int = 1
    note: str = ""
    constants: Constants = CONSTANTS

    @property
    def name(self) -> str:
        """What keys of the result start with."""
        words = [self.payload.name, str(self.hosts)]
        words += [] if self.store is StoreKind.S3 else [self.store.value]
        return "_".join(["sim", *words, *self.note.lower().replace(",", "").split()])


def is_wanted(scenario: Scenario) -> bool:
    """Return whether this is the line that has a bound."""
    return scenario.name == "sim_delta15_1000"


def scenarios(hosts: Sequence[int]) -> list[Scenario]:
    """Return every line for these sizes of a fleet, and what would change the largest one."""
    found = [
        Scenario(count, payload, store)
        for payload in PAYLOADS
        for store in StoreKind
        for count in hosts
        if store is not StoreKind.ORIGIN or count <= _ORIGIN_HOSTS
    ]
    return found + _changed(max(hosts))


def _changed(hosts: int) -> list[Scenario]:
    usual = Scenario(hosts, PAYLOADS[0])
    constants = usual.constants
    alike = replace(constants, slow_share=0)
    small_objects = replace(constants, delta_shard_bytes=PAYLOADS[0].read_bytes / 16)
    small_ranges = replace(constants, range_bytes=16 << 20)
    return [
        Scenario(hosts, PAYLOADS[1], note="ranges of 16 MiB", constants=small_ranges),
        replace(usual, note="polling", watch=False),
        replace(usual, note="jitter 2 s", constants=replace(constants, jitter_delta_s=2)),
        replace(usual, note="4 fetchers", constants=replace(constants, fetchers=4, readers=4)),
        replace(usual, note="waves of 10", max_unavailable=min(10, hosts)),
        replace(usual, note="a host dies, COMMIT", deaths=1),
        replace(usual, note="a host dies, ABORT", deaths=1, go_on=False),
        replace(usual, note="no stragglers", constants=alike),
        replace(usual, note="4 partitions", partitions=4),
        replace(usual, note="4 partitions, no stragglers", partitions=4, constants=alike),
        replace(usual, note="16 objects", constants=small_objects),
    ]
