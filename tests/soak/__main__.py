"""Uses the service for a long time while it fails: python -m tests.soak --minutes 20 [--seed 1].

Ends with a table of faults, one line of JSON and, where an invariant was broken, status 1. The
record of all calls stays in the work folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.soak.attached import AttachedTrainers
from tests.soak.checks import Checker
from tests.soak.contents import CheckpointContents, Contents, MemoryContents
from tests.soak.controller import Controller
from tests.soak.deck import ROWS
from tests.soak.faults import Injector, Tally
from tests.soak.fleet.fleet_soak import soak_fleet
from tests.soak.history import History
from tests.soak.outside import Outside
from tests.soak.site import Engine, MemoryEngineProcess, Site, VllmEngineProcess
from tests.soak.trainer import Trainer
from tests.support.in_place_trainers import end_fork_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.soak.callers import Caller

#: Short enough that what is too slow is met, too.
_FLAGS = (
    "--slots", "3", "--retain-versions", "100000", "--pause-lease-s", "5", "--commit-timeout-s",
    "2.5", "--drain-timeout-s", "5", "--push-idle-timeout-s", "3", "--delta-chain-length", "2",
    "--ingest", "1", "--same-host",
)  # fmt: skip
#: Everything is looked at after so many faults even where nothing had to be started again.
_CHECK_EVERY = 10
_SHOWN = 30
#: Between two looks at what the engine generates with, seconds.
_LOOK_S, _VLLM_LOOK_S = 0.02, 0.25


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
        address = site.server.address
        self._controller = Controller(site, contents, history, seed + 1, address)
        self._vllm = vllm
        self._trainer = trainer = Trainer(site, contents, history, seed + 2)
        self._callers: list[Caller] = [self._controller, trainer]
        outside = Outside(site, trainer, self._controller, self._still, seed + 3)
        blows = outside.blows
        if not vllm:
            attached = AttachedTrainers(site, history, self._still, random.Random(seed + 4))
            blows |= {"late": attached.late, "orphaned": attached.orphaned}
        self._injector = Injector(site, self._callers, seed, blows, vllm=vllm)
        self.checker = Checker(site, history, self._controller, _ranks() if vllm else 2)
        self._reviving: Future[bool] | None = None
        self._pool = ThreadPoolExecutor(1)
        self._goes_on, self._over = threading.Event(), threading.Event()
        self._faulty = 0
        #: Times that the engine told what it generates with.
        self.seen = 0

    @property
    def compared(self) -> int:
        """Versions that were read back and compared byte by byte."""
        return self._controller.compared

    @property
    def deltas(self) -> int:
        """Versions that were pushed as a delta."""
        return self._trainer.deltas

    @property
    def switches(self) -> int:
        """Applies and rollbacks between two steps that went well."""
        return self._controller.switches

    @property
    def handed_over(self) -> int:
        """Versions that a trainer wrote into the server's memory."""
        return self._trainer.handed_over

    @property
    def ingested(self) -> int:
        """Versions that came through an ingest process."""
        return self._trainer.ingested

    @property
    def missed(self) -> dict[str, int]:
        """Faults that nobody came by, and how often."""
        return self._injector.missed

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
        self._learn()
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self._round()
            restarted = self._heal()
            if self._reviving is not None:
                self._reviving.result()
                self._reviving = None
            self._check(restarted=restarted)
            self.checker.everything()
        finally:
            self._pool.shutdown()
            self._over.set()
            self._goes_on.set()
            for thread in threads:
                thread.join()
            for caller in self._callers:
                caller.close()

    def _learn(self) -> None:
        """Let each content of a real vLLM be live once: so its answers are known."""
        engine = self._site.engine
        if not isinstance(engine, VllmEngineProcess):
            return
        engine.learn(self._contents.digest(0))
        for number in range(1, self._contents.count):
            version = self._trainer.push(number)
            outcome = self._controller.apply_version(version)
            if outcome != "ok":
                raise RuntimeError(f"version {version} could not be applied: {outcome}")
            engine.learn(self._contents.digest(number))

    def _round(self) -> None:
        before = self._site.starts
        self._goes_on.set()
        self._history.note(fault=self._injector.once(engine=self._reviving is None))
        self._faulty += 1
        restarted = self._heal() or self._site.starts != before
        self._history.note(healed=restarted)
        if restarted or self._faulty % _CHECK_EVERY == 0:
            self._check(restarted=restarted)
            self._history.note(checked=restarted)

    def _heal(self) -> bool:
        """Start again what is dead; return whether the server was."""
        self._site.wake()
        self._revive()
        if self._site.pid:
            return False
        self._site.start_server()
        return True

    def _revive(self) -> None:
        """Start the engine again if it is dead; a real vLLM comes back while faults go on."""
        if not self._vllm:
            self._site.revive_engine()
            return
        if self._reviving is not None and self._reviving.done():
            self._reviving.result()
            self._reviving = None
        if self._reviving is None and not self._site.engine.alive():
            self._reviving = self._pool.submit(self._site.revive_engine)

    def _check(self, *, restarted: bool) -> None:
        with self._still():
            self.checker.check(restarted=restarted, engine=self._reviving is None)

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
            if told is not None and told["generating"]:
                self.seen += 1
                if told["content"] not in self._contents.known:
                    self._history.violate(f"a mixture is served: {told['content']}")
            time.sleep(_VLLM_LOOK_S if self._vllm else _LOOK_S)


def _vllm_site(folder: Path) -> tuple[Engine, Contents]:
    # Imported here: it needs torch and transformers.
    from tests.support.models import make_checkpoint
    from tests.support.vllm_server import VllmServer

    folders = [
        make_checkpoint(folder / f"checkpoint-{seed}", dtype="bfloat16", seed=seed)
        for seed in range(4)
    ]
    vllm = VllmServer(folders[0], folder / "run", dtype="bfloat16", tp=_ranks(), start_s=900)
    return VllmEngineProcess(vllm), CheckpointContents(folders)


def _ranks() -> int:
    """Return how many ranks a real vLLM gets: each needs a core of its own."""
    return min(2, len(os.sched_getaffinity(0)))


def _adopt(site: Site, engine: Engine, rng: random.Random) -> None:
    """Start both. A checkpoint is adopted once in a server's life, so it fails then, once."""
    site.plan.write_text(f"fetcher.persist=1*{rng.choice(('panic', 'error', 'sleep(1)'))}")
    site.start_server()
    engine.start()
    end = time.monotonic() + 30
    while not site.hits() and time.monotonic() < end:
        time.sleep(0.05)
    site.plan.unlink()


def _report(soak: Soak, history: History, seed: int, seconds: float, left: list[str]) -> int:
    tally = soak.tally
    for name, count in sorted(tally.faults.items()):
        print(f"{count:6d}  {name}")
    print("not met:", ", ".join(f"{name} {count}" for name, count in soak.missed.items()))
    wrong = [*history.violations, *(f"still alive: {line}" for line in left)]
    for text in wrong[:_SHOWN]:
        print(f"VIOLATION: {text}")
    if len(wrong) > _SHOWN:
        print(f"and {len(wrong) - _SHOWN} more")
    print("kinds of faults:")
    for row, text in ROWS.items():
        print(f"{tally.rows[row]:6d}  {row}: {text}")
    line = {
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "faults": tally.faults.total(),
        "kinds": len(ROWS),
        "least_of_a_kind": min(tally.rows[row] for row in ROWS),
        "kills_at_failpoints": tally.points.total(),
        "distinct": len(tally.points),
        "server_kills": tally.kills,
        "engine_kills": tally.engine_kills,
        "rank_kills": tally.rank_kills,
        "operations": history.operations,
        "versions": len(history.committed),
        "deltas": soak.deltas,
        "switches": soak.switches,
        "handed_over": soak.handed_over,
        "ingested": soak.ingested,
        "compared": soak.compared,
        "checks": soak.checker.looks,
        "looks": soak.seen,
        "violations": len(wrong),
        "leaked_segments": soak.checker.leaked,
        "lost_commits": len(history.lost),
    }
    print(json.dumps(line))
    idle = not (soak.seen and soak.compared and soak.checker.looks)
    return int(bool(wrong or soak.checker.leaked or history.lost or idle))


def main() -> int:
    """Return 1 where an invariant was broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0, help="0: any")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--vllm", action="store_true", help="a real vLLM with two workers")
    kind.add_argument("--fleet", action="store_true", help="several servers, etcd and a store")
    parser.add_argument("--work", type=Path, default=Path("build/soak"), help="for the record")
    options = parser.parse_args()
    seed = options.seed or random.randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.fleet:
        return soak_fleet(options.minutes * 60, seed, options.work)
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
        _adopt(site, engine, random.Random(seed))
        soak = Soak(site, contents, history, seed, vllm=options.vllm)
        soak.run(options.minutes * 60)
    finally:
        end_fork_server()
        left = site.stop()
        shutil.copy(folder / "run" / "server.log", options.work / f"server-{seed}.log")
        history.close()
        shutil.rmtree(folder)
    return _report(soak, history, seed, time.monotonic() - start, left)


if __name__ == "__main__":
    sys.exit(main())
