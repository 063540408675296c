"""Uses a fleet for a long time while members, coordinators, etcd and the store fail."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.soak.contents import MemoryContents
from tests.soak.fleet.decisions import DecisionWatch
from tests.soak.fleet.engine_watch import EngineWatch
from tests.soak.fleet.fleet_callers import FleetTrainer, Operator
from tests.soak.fleet.fleet_checks import Patience, judge
from tests.soak.fleet.fleet_deck import KINDS
from tests.soak.fleet.fleet_end import FleetEnd
from tests.soak.fleet.fleet_faults import FleetFaults
from tests.soak.fleet.fleet_injector import FleetInjector
from tests.soak.fleet.fleet_record import COMMIT, FleetRecord
from tests.soak.fleet.fleet_site import (
    FLEET,
    MAX_AGE_S,
    PREFIX,
    UNDECIDED_S,
    UNLIMITED,
    FleetSite,
)
from tests.soak.history import History

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.fleet.fleet_checks import Findings

__all__ = ["soak_fleet"]

#: What a fence takes beyond its limit, on a machine that is busy; seconds.
_SLACK_S = 2.0
PATIENCE = Patience(UNDECIDED_S + _SLACK_S, MAX_AGE_S + _SLACK_S, frozenset({UNLIMITED}))
#: So many faults, then none until the fleet has come to one version, and a moment longer.
_BETWEEN_CALMS = 15
_CALM_S = 3.0
#: In how long it does, and starts, on a machine that is busy.
_SETTLE_S, _START_S = 90.0, 240.0
_LOOK_S = 0.05
#: Of each kind, and of all kinds, in so many minutes.
_LEAST, _FAULTS, _MINUTES = 5, 200, 20
_SHOWN = 30


class FleetSoak:
    """One run.

    Args:
        site: The processes, started.
        history: The record of calls.
        record: What is seen of decisions and engines.
        seed: Of all choices.
    """

    def __init__(self, site: FleetSite, history: History, record: FleetRecord, seed: int) -> None:
        self._site, self.history, self.record = site, history, record
        contents = MemoryContents()
        contents.digest(0)
        self.trainer = FleetTrainer(site.origin, contents, history, seed + 1)  # type: ignore[arg-type]  # has what trainers look at
        self.operator = Operator(site, contents, history, seed + 2)
        self.decisions = DecisionWatch(site.etcd.addresses, f"/{PREFIX}/{FLEET}/", record, history)
        self.engines = [
            EngineWatch(name, one.engine.told, contents.known, record, history)
            for name, one in site.members.items()
        ]
        self._calls_over, self._over = threading.Event(), threading.Event()
        faults = FleetFaults(site, self.operator, self._calls_over, self._barriers_without)
        self.injector = FleetInjector(faults.commit, history, random.Random(seed))
        self.end = FleetEnd(site, history, record, self.trainer)
        self.calms = 0
        self._begun = time.monotonic()

    def run(self, seconds: float) -> None:
        """Go on for so long, then look at everything."""
        goes_on = threading.Event()
        goes_on.set()
        callers = (self.trainer, self.operator)
        calls = [threading.Thread(target=c.run, args=(goes_on, self._calls_over)) for c in callers]
        runs = [self.decisions.run, *(one.run for one in self.engines)]
        looks = [threading.Thread(target=run, args=(self._over,)) for run in runs]
        for thread in (*calls, *looks):
            thread.start()
        try:
            self._until(self._first_commit, _START_S, "the first version is live everywhere")
            self._begun = time.monotonic()
            self._strike(self._begun + seconds)
            self._calls_over.set()
            self.injector.settle()
            for thread in calls:
                thread.join()
            self._finish()
        finally:
            self._calls_over.set()
            self.injector.close()
            self._over.set()
            for thread in (*calls, *looks):
                thread.join()
            for caller in callers:
                caller.close()

    def findings(self) -> Findings:
        """Return what was seen to be wrong so far."""
        return judge(self.record, PATIENCE)

    def verdicts(self, verdict: str) -> int:
        """Return how many applies ended so."""
        return sum(one.outcome == verdict for one in list(self.record.applies.values()))

    def _barriers_without(self, member: str) -> int:
        applies = list(self.record.applies.values())
        barriers = [one for one in applies if one.kind == "barrier" and one.outcome == COMMIT]
        return sum(member not in one.members for one in barriers)

    def _strike(self, end: float) -> None:
        dealt = 0
        while time.monotonic() < end:
            self.injector.once(end)
            dealt += 1
            self._look_for_dead()
            if dealt % _BETWEEN_CALMS == 0:
                self._calm()

    def _calm(self) -> None:
        """Let faults end, and see that all members come to what is decided."""
        self.injector.settle()
        self._until(self._agree, _SETTLE_S, "all members serve what is decided")
        self.calms += 1
        time.sleep(_CALM_S)
        self._show()

    def _finish(self) -> None:
        self._site.heal()
        self._until(self._agree, _SETTLE_S, "in the end all members serve what is decided")
        self.trainer.push()
        # A follower that lost its origin looks for it every 30 s.
        self._until(lambda: self.operator.last() == "ok", _SETTLE_S, "a last apply goes well")
        self._until(self._agree, _SETTLE_S, "all members serve what was applied last")
        self.decisions.look()
        self.end.look(self.operator.answers)
        self._show()

    def _first_commit(self) -> bool:
        return self.verdicts(COMMIT) > 0 and self._agree()

    def _agree(self) -> bool:
        """Tell whether all engines generate with what was decided last."""
        applies = self.record.applies
        commits = [n for n in sorted(applies) if applies[n].outcome == COMMIT]
        if not commits:
            return False
        return {one.serves for one in self.engines} == {applies[commits[-1]].target}

    def _until(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                serving = {one.member: one.serves[-8:] for one in self.engines}
                self.history.violate(f"it did not come within {seconds:g} s: {what}; {serving}")
                return
            time.sleep(_LOOK_S)

    def _look_for_dead(self) -> None:
        for one in self._site.servers:
            # A fault that began or ended meanwhile is seen by one of the three.
            if not one.pid and f"{one.name} server" not in self.injector.taken and not one.pid:
                self.history.violate(f"the server of {one.name} ended by itself")
                one.start()

    def _show(self) -> None:
        found = self.findings()
        print(
            f"{time.monotonic() - self._begun:6.0f} s  {self.injector.struck.total()} faults, "
            f"{len(self.history.committed)} versions, {self.verdicts(COMMIT)} commits, "
            f"{self.verdicts('ABORT')} aborts; undecided {len(found.undecided_served)}, "
            f"mixed {len(found.mixed_fleet_after_barrier)}, "
            f"began what was left {len(found.begun)}, "
            f"violations {len(found.violations) + len(self.history.violations)}, "
            f"lost {len(self.history.lost)}",
            flush=True,
        )


def soak_fleet(seconds: float, seed: int, work: Path) -> int:
    """Run it, print what came of it and return 1 where something was wrong.

    Args:
        seconds: For how long there are faults.
        seed: Of all choices.
        work: For the record and logs.
    """
    etcd = shutil.which("etcd")
    if etcd is None:
        print("etcd is not installed (Debian package etcd-server)")
        return 2
    # Whoever ends it ends all that it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    history = History(work / f"fleet-{seed}.jsonl")
    # Unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    record = FleetRecord(MemoryContents().digest(0))
    begun = time.monotonic()
    site = FleetSite(folder, etcd)
    left: list[str] = []
    try:
        site.start()
        soak = FleetSoak(site, history, record, seed)
        soak.run(seconds)
    finally:
        left = site.stop()
        site.keep_logs(work, seed)
        history.close()
        shutil.rmtree(folder, ignore_errors=True)
    for line in left:
        history.violations.append(f"still alive: {line}")
    return _report(soak, seed, time.monotonic() - begun, seconds / (60 * _MINUTES))


def _report(soak: FleetSoak, seed: int, seconds: float, share: float) -> int:
    injector, history, found = soak.injector, soak.history, soak.findings()
    print("kinds of faults:")
    for kind, (text, *_) in KINDS.items():
        print(f"{injector.struck[kind]:6d}  {text}; missed {injector.missed[kind]}")
    violations = [*history.violations, *found.violations, *found.begun]
    wrong = [*found.mixed_fleet_after_barrier, *found.undecided_served, *violations]
    for text in wrong[:_SHOWN]:
        print(f"VIOLATION: {text}")
    if len(wrong) > _SHOWN:
        print(f"and {len(wrong) - _SHOWN} more")
    applies = soak.record.applies.values()
    least = min(injector.struck[kind] for kind in KINDS)
    line = {
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "faults": injector.struck.total(),
        "kinds": len(KINDS),
        "least_of_a_kind": least,
        "overlapping": injector.overlapping,
        "operations": history.operations,
        "versions": len(history.committed),
        "deltas": soak.trainer.deltas,
        "commits": soak.verdicts(COMMIT),
        "aborts": soak.verdicts("ABORT"),
        "barriers": sum(one.kind == "barrier" and one.outcome == COMMIT for one in applies),
        "rollbacks": sum(one.rollback and one.outcome == COMMIT for one in applies),
        "answers": len(soak.operator.answers),
        "readings": soak.decisions.readings,
        "looks": sum(one.answers for one in soak.engines),
        "calms": soak.calms,
        "compared": soak.end.compared,
        "undecided_served": len(found.undecided_served),
        "mixed_fleet_after_barrier": len(found.mixed_fleet_after_barrier),
        "violations": len(violations),
        "lost_commits": len(history.lost),
    }
    print(json.dumps(line))
    if least < int(_LEAST * share) or injector.struck.total() < int(_FAULTS * share):
        print("too few faults were met: the machine is too slow, or too short a time was given")
        return 1
    idle = not (soak.operator.switches and soak.end.compared and soak.decisions.readings)
    return int(bool(wrong or history.lost or idle))
