"""Uses the service for a long time while it fails: python -m tests.soak --minutes 20 [--seed 1].

Ends with a table of faults, one line of JSON and, where an invariant was broken, status 1. The
record of all calls stays in the work folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.soak.callers import Caller, Controller, Trainer
from tests.soak.checks import Checker
from tests.soak.contents import CheckpointContents, Contents, MemoryContents
from tests.soak.faults import Injector, Tally
from tests.soak.history import History
from tests.soak.site import Engine, MemoryEngineProcess, Site, VllmEngineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLAGS = ("--slots", "3", "--retain-versions", "100000", "--pause-lease-s", "5")
#: Everything is looked at after so many faults even where nothing had to be started again.
_CHECK_EVERY = 10
_SHOWN = 30


class Soak:
    """One run.

    Args:
        site: The processes.
        contents: What is pushed.
        history: The record.
        seed: Of all choices.
        vllm: The engine is a real vLLM.
    """

    def __init__(
        self, site: Site, contents: Contents, history: History, seed: int, *, vllm: bool
    ) -> None:
        self._site = site
        self._contents = contents
        self._history = history
        self._injector = Injector(site, seed, vllm=vllm)
        self._controller = Controller(site, contents, history, seed + 1)
        self._callers: list[Caller] = [
            self._controller,
            Trainer(site, contents, history, seed + 2),
        ]
        self.checker = Checker(site, history, self._controller, vllm=vllm)
        self._goes_on, self._over = threading.Event(), threading.Event()
        self._faulty = 0

    @property
    def tally(self) -> Tally:
        """What was done to the service."""
        return self._injector.tally

    def run(self, seconds: float) -> None:
        """Go on for so long, then look at everything."""
        works = [(caller.run, (self._goes_on, self._over)) for caller in self._callers]
        threads = [threading.Thread(target=work, args=args) for work, args in works]
        threads.append(threading.Thread(target=self._watch))
        self._check(restarted=True)
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self._round()
            self._check(restarted=self._heal())
            self.checker.everything()
        finally:
            self._over.set()
            self._goes_on.set()
            for thread in threads:
                thread.join()
            for caller in self._callers:
                caller.close()

    def _round(self) -> None:
        before = self._site.starts
        self._goes_on.set()
        self._injector.once()
        self._faulty += 1
        restarted = self._heal() or self._site.starts != before
        if restarted or self._faulty % _CHECK_EVERY == 0:
            self._check(restarted=restarted)

    def _heal(self) -> bool:
        """Start again what is dead; return whether the server was."""
        self._site.revive_engine()
        if self._site.pid:
            return False
        self._site.start_server()
        return True

    def _check(self, *, restarted: bool) -> None:
        with self._still():
            self.checker.check(restarted=restarted)

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Let nobody call meanwhile."""
        self._goes_on.clear()
        with contextlib.ExitStack() as stack:
            for caller in self._callers:
                stack.enter_context(caller.busy)
            yield

    def _watch(self) -> None:
        """Ask the engine again and again what it generates with: never a mixture."""
        while not self._over.is_set():
            told = self._site.engine.told()
            generating = told is not None and told["generating"]
            if told is not None and generating and told["content"] not in self._contents.known:
                self._history.violate(f"a mixture is served: {told['content']}")
            time.sleep(0.02)


def _vllm_site(folder: Path) -> tuple[Engine, Contents]:
    # Imported here: it needs torch and transformers.
    from tests.support.models import make_checkpoint
    from tests.support.vllm_server import VllmServer

    folders = [
        make_checkpoint(folder / f"checkpoint-{seed}", dtype="bfloat16", seed=seed)
        for seed in range(4)
    ]
    vllm = VllmServer(folders[0], folder / "run", dtype="bfloat16", tp=2, start_s=900)
    return VllmEngineProcess(vllm), CheckpointContents(folders)


def _report(soak: Soak, history: History, seed: int, seconds: float, left: list[str]) -> int:
    tally = soak.tally
    for name, count in sorted(tally.faults.items()):
        print(f"{count:6d}  {name}")
    wrong = [*history.violations, *(f"still alive: {line}" for line in left)]
    for text in wrong[:_SHOWN]:
        print(f"VIOLATION: {text}")
    if len(wrong) > _SHOWN:
        print(f"and {len(wrong) - _SHOWN} more")
    line = {
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "faults": tally.faults.total(),
        "operations": history.operations,
        "violations": len(wrong),
        "leaked_segments": soak.checker.leaked,
        "lost_commits": len(history.lost),
        "server_kills": tally.kills,
        "server_kill_points": len(tally.kill_points),
        "engine_kills": tally.engine_kills,
        "versions": len(history.committed),
    }
    print(json.dumps(line))
    return int(bool(wrong or soak.checker.leaked or history.lost))


def main() -> int:
    """Return 1 where an invariant was broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0, help="0: any")
    parser.add_argument("--vllm", action="store_true", help="a real vLLM with two workers")
    parser.add_argument("--work", type=Path, default=Path("build/soak"), help="for the record")
    options = parser.parse_args()
    seed = options.seed or random.randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    options.work.mkdir(parents=True, exist_ok=True)
    history = History(options.work / f"history-{seed}.jsonl")
    # Unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    (folder / "run").mkdir()
    engine, contents = (
        _vllm_site(folder)
        if options.vllm
        else (MemoryEngineProcess(folder / "run"), MemoryContents())
    )
    contents.digest(0)
    site = Site(folder, engine, _FLAGS)
    start = time.monotonic()
    left: list[str] = []
    try:
        site.start_server()
        engine.start()
        soak = Soak(site, contents, history, seed, vllm=options.vllm)
        soak.run(options.minutes * 60)
    finally:
        left = site.stop()
        shutil.copy(folder / "run" / "server.log", options.work / f"server-{seed}.log")
        history.close()
    result = _report(soak, history, seed, time.monotonic() - start, left)
    shutil.rmtree(folder)
    return result


if __name__ == "__main__":
    sys.exit(main())
