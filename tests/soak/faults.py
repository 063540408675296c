"""Random faults: failpoints inside the processes, and signals from outside."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.site import Site

__all__ = ["Injector", "Tally", "placed_points"]

_ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"failpoints\.(?:hit|reach)\(\s*\"([a-z0-9_.]+)\"")
#: Only a real vLLM has these; the in-memory engine stands behind the bridge's protocol alone.
_IN_VLLM = ("worker.", "bridge.")
#: Met when a server starts.
_STARTING = ("store.recover", "journal.read", "receive.resume", "file.")
_ACTIONS = {"panic": 60, "sleep": 20, "error": 25, "stop": 5}
#: Where the code asks the system for something: only there can it answer with an error.
_FALLIBLE = ("file.", "store.", "fetcher.", "journal.", "stage.", "receive.keep", *_IN_VLLM)
_ERRORS = ("EIO", "ENOSPC", "EMFILE", "ENOMEM")
#: How long a fault may wait until it is met, seconds.
_PATIENCE_S = 2.0


def placed_points(*, vllm: bool) -> list[str]:
    """Return the failpoints that are in the code and that this soak can meet."""
    found: set[str] = set()
    for folder in ("weightsync", "server/weightsync_server"):
        for path in (_ROOT / folder).rglob("*.py"):
            found.update(_CALL.findall(path.read_text()))
    return sorted(name for name in found if vllm or not name.startswith(_IN_VLLM))


@dataclass
class Tally:
    """What was done to the service.

    Attributes:
        faults: How often, by fault.
        kills: SIGKILLs of the server.
        kill_points: Failpoints at which the server was killed.
        engine_kills: SIGKILLs of a process of the engine.
    """

    faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    kill_points: set[str] = field(default_factory=set)
    engine_kills: int = 0


class Injector:
    """Commits one random fault after another.

    Args:
        site: The processes.
        seed: Of all choices.
        vllm: The engine is a real vLLM, which takes long to start again.
    """

    def __init__(self, site: Site, seed: int, *, vllm: bool) -> None:
        self.tally = Tally()
        self._site = site
        self._rng = random.Random(seed)
        self._points = placed_points(vllm=vllm)
        self._met = len(site.hits())
        starting = [name for name in self._points if name.startswith(_STARTING)]
        self._starting = starting
        self._kinds: list[tuple[Callable[[], None], int]] = [
            (self._point, 70 if self._points else 0),
            (self._kill_twice, 6 if starting else 0),
            (self._kill_server, 10 if self._points else 40),
            (self._kill_fetcher, 8),
            (self._stop_server, 4),
            (self._stop_fetcher, 4),
            (self._kill_engine, 5),
            (self._stop_engine, 2),
        ]

    def once(self) -> None:
        """Commit one fault and see it through; what died stays dead."""
        acts, weights = zip(*self._kinds, strict=True)
        time.sleep(self._rng.uniform(0, 0.2))
        self._rng.choices(acts, weights)[0]()

    # Failpoints.

    def _point(self) -> None:
        name = self._rng.choice(self._points)
        actions = {a: n for a, n in _ACTIONS.items() if a != "error" or name.startswith(_FALLIBLE)}
        (action,) = self._rng.choices(list(actions), list(actions.values()))
        skip = self._rng.choice((0, 0, 0, 1, 2, 5))
        argument = {"sleep": f"({self._rng.uniform(0.1, 1.5):.2f})"}.get(action, "")
        if action == "error":
            argument = f"({self._rng.choice(_ERRORS)})"
        self._arm(f"{name}={skip}>1*{action}{argument}")
        self._await_hit(_PATIENCE_S)
        self._disarm()

    def _kill_twice(self) -> None:
        """Kill the server, then once more while it recovers."""
        self._kill_server()
        self._arm(f"{self._rng.choice(self._starting)}={self._rng.choice((0, 1))}>1*panic")
        with contextlib.suppress(RuntimeError):
            self._site.start_server()
        self._await_hit(1)
        self._disarm()

    def _arm(self, plan: str) -> None:
        fresh = self._site.plan.with_suffix(".new")
        fresh.write_text(plan)
        fresh.replace(self._site.plan)

    def _disarm(self) -> None:
        self._site.plan.unlink(missing_ok=True)
        self._count_hits()

    def _await_hit(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._count_hits():
                # What it leads to is to happen before it is healed.
                time.sleep(0.3)
                return
            time.sleep(0.02)

    def _count_hits(self) -> bool:
        """Count what was met since the last look; wake what was stopped."""
        hits = self._site.hits()
        fresh, self._met = hits[self._met :], len(hits)
        for name, action, pid in fresh:
            self.tally.faults[f"{name} {action}"] += 1
            if action == "panic":
                self._died(name, pid)
            if action == "stop":
                time.sleep(self._rng.uniform(0.2, 1.5))
                _send(pid, signal.SIGCONT)
        return bool(fresh)

    def _died(self, name: str, pid: int) -> None:
        process = self._site.server.process
        if process is not None and process.pid == pid:
            process.wait(10)
            self.tally.kills += 1
            self.tally.kill_points.add(name)
        elif name.startswith(_IN_VLLM):
            self.tally.engine_kills += 1

    # Signals.

    def _kill_server(self) -> None:
        if self._site.pid:
            self._site.kill_server()
            self._count("SIGKILL server")
            self.tally.kills += 1

    def _kill_fetcher(self) -> None:
        if fetchers := self._site.fetchers():
            _send(self._rng.choice(fetchers), signal.SIGKILL)
            self._count("SIGKILL fetcher")

    def _kill_engine(self) -> None:
        if victims := self._site.engine.victims():
            _send(self._rng.choice(victims), signal.SIGKILL)
            self._count("SIGKILL engine")
            self.tally.engine_kills += 1
            time.sleep(0.5)

    def _stop_server(self) -> None:
        self._stop([self._site.pid] if self._site.pid else [], "SIGSTOP server")

    def _stop_fetcher(self) -> None:
        self._stop(self._site.fetchers(), "SIGSTOP fetcher")

    def _stop_engine(self) -> None:
        self._stop(self._site.engine.victims(), "SIGSTOP engine")

    def _stop(self, pids: list[int], name: str) -> None:
        if pids:
            pid = self._rng.choice(pids)
            _send(pid, signal.SIGSTOP)
            time.sleep(self._rng.uniform(0.2, 2.0))
            _send(pid, signal.SIGCONT)
            self._count(name)

    def _count(self, name: str) -> None:
        self.tally.faults[name] += 1


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
