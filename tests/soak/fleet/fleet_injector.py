"""Commits faults of a fleet beside one another, so many at a time, and now and then none."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.soak.fleet.fleet_deck import deal, fleet_deck, missed

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.soak.fleet.fleet_deck import Stroke
    from tests.soak.history import History

__all__ = ["FleetInjector"]

#: At once; and between the beginnings of two, seconds.
_MOST = 4
_PACE_S = (0.2, 3.0)
_LOOK_S = 0.05


class FleetInjector:
    """Deals faults in an order that the seed decides, each as soon as it may begin.

    Args:
        commit: Commits a fault to its end; returns whether it has struck.
        history: The record.
        rng: Of all choices.

    Attributes:
        struck: How often each kind has.
        missed: How often nobody came by; such a kind comes again sooner.
        overlapping: How many began while another one lasted.
    """

    def __init__(
        self, commit: Callable[[Stroke], bool], history: History, rng: random.Random
    ) -> None:
        self.struck: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.overlapping = 0
        self._commit, self._history, self._rng = commit, history, rng
        self._deck = fleet_deck(rng)
        self._pool = ThreadPoolExecutor(_MOST)
        self._taken: set[str] = set()
        self._lasting = 0
        self._lock = threading.Lock()

    @property
    def taken(self) -> frozenset[str]:
        """What faults are at now."""
        with self._lock:
            return frozenset(self._taken)

    def once(self, end: float) -> None:
        """Begin the next fault when it may, unless that is later than `end`."""
        stroke = deal(self._deck, self._rng)
        time.sleep(self._rng.uniform(*_PACE_S))
        while stroke.takes & self.taken or self._lasting >= _MOST:
            time.sleep(_LOOK_S)
        if time.monotonic() >= end:
            return
        with self._lock:
            self.overlapping += bool(self._lasting)
            self._lasting += 1
            self._taken |= stroke.takes
        self._pool.submit(self._see_through, stroke)

    def settle(self) -> None:
        """Return when no fault is left."""
        while self.taken:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Wait for all."""
        self._pool.shutdown()

    def _see_through(self, stroke: Stroke) -> None:
        name = stroke.card.name
        facts = {"victim": stroke.victim, "seconds": round(stroke.seconds, 1)}
        if stroke.point:
            facts["point"] = stroke.point
        self._history.note(fault=name, **facts)
        try:
            struck = self._commit(stroke)
        except Exception as error:
            # A fault that nobody heals would make the rest of the run worth little.
            self._history.violate(f"the soak itself failed in {name}: {error!r:.300}")
            struck = False
            raise
        finally:
            with self._lock:
                (self.struck if struck else self.missed)[name] += 1
                if not struck:
                    missed(stroke.card)
                self._lasting -= 1
                self._taken -= stroke.takes
            self._history.note(healed=name, struck=struck, **facts)
