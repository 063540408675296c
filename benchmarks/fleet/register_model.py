"""etcd as a fleet uses it: puts that are served one behind the other, and watches."""

from __future__ import annotations

import math
from collections.abc import Generator
from random import Random

import simpy

from benchmarks.fleet.constants import Constants
from benchmarks.fleet.queues import Link

__all__ = ["SimulatedRegister"]


class SimulatedRegister:
    """Serialises puts and spreads what was put.

    Args:
        env: The simulation.
        constants: The figures.
        random: For latencies.
    """

    def __init__(self, env: simpy.Environment, constants: Constants, random: Random) -> None:
        self._env = env
        self._constants = constants
        self._random = random
        self._queue = Link(constants.puts_per_s)

    def put(self) -> Generator[simpy.Event, None, None]:
        """Put a key: a put's own latency, and the queue of those before it."""
        constants, env = self._constants, self._env
        latency = self._random.lognormvariate(math.log(constants.put_s), constants.put_sigma)
        served = self._queue.send(env.now, 1)
        yield env.timeout(max(served - env.now, latency))

    def spread(self, place: int) -> Generator[simpy.Event, None, None]:
        """Wait until the watcher at this place of the fan-out has what was put now."""
        constants = self._constants
        yield self._env.timeout(constants.watch_first_s + place * constants.watch_step_s)
