"""Faults, one after the other: failpoints inside the processes, and blows from outside."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.soak import points
from tests.soak.deck import Card, deck

if TYPE_CHECKING:
    from tests.soak.callers import Caller
    from tests.soak.site import Site

__all__ = ["Injector", "Tally"]

#: How long a fault may wait until somebody comes by, seconds.
_PATIENCE_S = 4.0
#: How long what a fault leads to may take before it is healed, seconds.
_AFTER_S = 0.2
#: A real vLLM takes most of a minute to start: only so often is one killed.
_VLLM_KILL_S = 150.0


@dataclass
class Tally:
    """What was done to the service.

    Attributes:
        faults: How often, by fault.
        rows: How often, by kind of fault; see `deck.ROWS`.
        kills: SIGKILLs of the server.
        points: How often the server was killed at each failpoint.
        engine_kills: SIGKILLs of a process of the engine.
        rank_kills: Those of them that struck a rank.
    """

    faults: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    points: Counter[str] = field(default_factory=Counter)
    engine_kills: int = 0
    rank_kills: int = 0

    def count(self, name: str, row: str = "") -> None:
        """Take note of a fault, and of the kind that it is one of."""
        self.faults[name] += 1
        if row:
            self.rows[row] += 1


class Injector:
    """Commits one fault after another; those that were met least come first.

    Args:
        site: The processes.
        callers: Trainer and controller, who come by where a fault waits for them.
        seed: Of all choices.
        blows: What is done from outside, by name; each returns whether it struck.
        vllm: The engine is a real vLLM, which takes long to start again.
    """

    def __init__(
        self,
        site: Site,
        callers: list[Caller],
        seed: int,
        blows: dict[str, Callable[[], bool]],
        *,
        vllm: bool,
    ) -> None:
        self.tally = Tally()
        self._site = site
        self._callers = callers
        self._rng = random.Random(seed)
        self._blows = blows | {
            "kill_server": self._kill_server,
            "kill_fetcher": lambda: self._kill_one(self._site.fetchers()),
            "kill_ingest": lambda: self._kill_one(self._site.ingesters()),
            "kill_engine": self._kill_engine,
            "stop_server": lambda: self._stop([self._site.pid] if self._site.pid else []),
            "stop_fetcher": lambda: self._stop(self._site.fetchers()),
            "stop_engine": lambda: self._stop(self._site.engine.victims()),
            "engine_in_pause": self._engine_in_pause,
            "kill_twice": self._kill_twice,
        }
        self._deck = deck(points.placed(vllm=vllm), self._blows, self._rng, vllm=vllm)
        self._vllm = vllm
        self._next_vllm_kill = time.monotonic() + 60
        self._met = len(site.hits())
        self._card: Card | None = None

    @property
    def missed(self) -> dict[str, int]:
        """How often a fault waited and nobody came by."""
        return {card.name: card.missed for card in self._deck.cards if card.missed}

    def once(self, *, engine: bool = True) -> str:
        """Commit one fault and see it through; what died stays dead. Return its name.

        Args:
            engine: There is one that faults can wait for.
        """
        spare = self._vllm and time.monotonic() < self._next_vllm_kill
        self._card = card = self._deck.draw(
            lambda card: not (spare and card.kills_engine) and (engine or not card.needs_engine)
        )
        time.sleep(self._rng.uniform(0, 0.05))
        before = self.tally.engine_kills
        struck = self._play(card)
        self._deck.played(card, struck=struck)
        if self.tally.engine_kills > before:
            self._next_vllm_kill = time.monotonic() + _VLLM_KILL_S
        return card.name

    def _play(self, card: Card) -> bool:
        if card.blow:
            struck = self._blows[card.blow]()
            if struck:
                self.tally.count(card.name, card.row)
            return struck
        if card.act:
            struck = self._done(card.act)
            if struck:
                self.tally.count(card.name, card.row)
            return struck
        return self._point(card)

    # Failpoints

    def _point(self, card: Card) -> bool:
        plan = card.plan(self._rng)
        if card.point.startswith(points.SURVIVING):
            self._half_a_push()
        if card.point.startswith((*points.STARTING, *points.SURVIVING)):
            self._kill_server()
            self._arm(plan)
            with contextlib.suppress(RuntimeError):
                self._site.start_server()
            self._wish("revive" if card.point.startswith(points.SURVIVING) else "push")
        else:
            self._arm(plan)
            self._wish(points.wish(card.point))
        met = self._await_hit(card.point)
        self._wish("")
        self._disarm()
        return met

    def _half_a_push(self) -> None:
        trainer = self._callers[-1]
        self._wish("survive")
        end = time.monotonic() + _PATIENCE_S
        while getattr(trainer, "half", None) is None and time.monotonic() < end:
            time.sleep(0.02)
        self._wish("")

    def _wish(self, act: str) -> None:
        for caller in self._callers:
            caller.wish = act if hasattr(caller, act) else ""

    def _done(self, act: str) -> bool:
        """Return whether a caller has done something soon after it was wished."""
        (caller,) = [caller for caller in self._callers if hasattr(caller, act)]
        before = caller.done[act]
        caller.wish = act
        end = time.monotonic() + 3 * _PATIENCE_S
        while caller.done[act] == before and time.monotonic() < end and self._site.pid:
            time.sleep(0.02)
        caller.wish = ""
        return caller.done[act] > before

    def _arm(self, plan: str) -> None:
        fresh = self._site.plan.with_suffix(".new")
        fresh.write_text(plan)
        fresh.replace(self._site.plan)

    def _disarm(self) -> None:
        self._site.plan.unlink(missing_ok=True)
        self._count_hits()

    def _await_hit(self, point: str) -> bool:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            if point in self._count_hits():
                # What it leads to is to happen before it is healed.
                time.sleep(_AFTER_S)
                return True
            time.sleep(0.01)
        return point in self._count_hits()

    def _count_hits(self) -> list[str]:
        """Count what was met since the last look, and return it; wake what was stopped."""
        hits = self._site.hits()
        fresh, self._met = hits[self._met :], len(hits)
        for name, action, pid in fresh:
            wanted = self._card is not None and self._card.point == name
            self.tally.count(f"{name} {action}", self._card.row if wanted and self._card else "")
            if action == "panic":
                self._died(name, pid)
            if action == "stop":
                time.sleep(self._rng.uniform(0.2, 1.5))
                _send(pid, signal.SIGCONT)
        return [name for name, _, _ in fresh]

    def _died(self, name: str, pid: int) -> None:
        process = self._site.server.process
        if process is not None and process.pid == pid:
            process.wait(10)
            self.tally.kills += 1
            self.tally.points[name] += 1
            if self._card is not None and self._card.row != "1":
                self.tally.rows["1"] += 1
        elif name.startswith(points.IN_ENGINE):
            self.tally.engine_kills += 1
            self.tally.rank_kills += name.startswith("worker.")

    def _kill_twice(self) -> bool:
        """Kill the server, then once more while it recovers."""
        self._kill_server()
        self._arm(f"{self._rng.choice(points.STARTING[:3])}=1*panic")
        with contextlib.suppress(RuntimeError):
            self._site.start_server()
        end = time.monotonic() + 1
        while not self._count_hits() and time.monotonic() < end:
            time.sleep(0.02)
        self._disarm()
        return True

    def _engine_in_pause(self) -> bool:
        """Kill the engine between the pause and the commit."""
        self._arm("apply.commit=1*sleep(0.5)")
        self._wish("apply")
        met = self._await_hit("apply.commit")
        self._wish("")
        struck = met and self._kill_engine()
        self._disarm()
        return struck

    # Signals

    def _kill_server(self) -> bool:
        if not self._site.pid:
            return False
        self._site.kill_server()
        self.tally.kills += 1
        return True

    def _kill_one(self, pids: list[int]) -> bool:
        if pids:
            _send(self._rng.choice(pids), signal.SIGKILL)
        return bool(pids)

    def _kill_engine(self) -> bool:
        victims = self._site.engine.victims()
        if victims:
            _send(self._rng.choice(victims), signal.SIGKILL)
            self.tally.engine_kills += 1
            self.tally.rank_kills += 1
            time.sleep(_AFTER_S)
        return bool(victims)

    def _stop(self, pids: list[int]) -> bool:
        if not pids:
            return False
        pid = self._rng.choice(pids)
        _send(pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.2, 1.5))
        _send(pid, signal.SIGCONT)
        return True


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
