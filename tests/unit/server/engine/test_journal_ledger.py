"""Engines of a host that go together, in random order, with whatever fails, over a fake journal.

Time is virtual, so that a seed is one course of events; see `course`.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import Verdict
from weightsync_server.engine.host_apply import (
    EnginePlan,
    JournalLedger,
    LocalEngine,
    switch_together,
)

SEEDS = range(1500)


class _Selector(selectors.DefaultSelector):
    """Does not wait: its time goes on at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


@dataclass
class Course:
    """What happens to each, drawn once, and what was seen."""

    chance: random.Random
    seen: list[tuple[float, str, str]] = field(default_factory=list)

    def note(self, who: str, what: str) -> None:
        self.seen.append((round(asyncio.get_running_loop().time(), 6), who, what))

    def times(self, what: str) -> list[float]:
        return [at for at, _, seen in self.seen if seen == what]

    def who(self, what: str) -> set[str]:
        return {who for _, who, seen in self.seen if seen == what}


class Engine:
    """One engine: the steps of its cutover, and what an applier does around them."""

    def __init__(self, name: str, course: Course) -> None:
        self.name, self.course = name, course
        chance = course.chance
        self.takes = {step: chance.uniform(0.1, 3) for step in ("pause", "write", "on", "back")}
        self.fails = {step for step in self.takes if chance.random() < 0.08}
        self.unproved = chance.random() < 0.1
        self.unforeseen = chance.random() < 0.1

    async def _step(self, step: str) -> None:
        await asyncio.sleep(self.takes[step])
        if step in self.fails:
            if self.unforeseen:
                raise RuntimeError(step)
            raise WeightSyncError(Reason.ENGINE_AWAY, f"{step} failed")

    async def pause(self, _: object, **how: object) -> None:
        assert how["alone"] is False
        await self._step("pause")
        self.course.note(self.name, "still")

    async def write(self, _: object) -> list[str]:
        self.course.note(self.name, "writing")
        await self._step("write")
        if self.unproved:
            return ["rank 0: proved nothing"]
        self.course.note(self.name, "proved")
        return []

    async def release(self, _: object) -> str:
        await self._step("on")
        self.course.note(self.name, "serves new")
        return self.name

    async def go_back(self, _: object, failures: list[str]) -> None:
        await self._step("back")
        self.course.note(self.name, "serves old")
        raise WeightSyncError(Reason.APPLY_RESTORED, "; ".join(failures))

    async def make_live(self, session: object, plan: object, steps: Callable[..., Any]) -> object:
        try:
            return await steps(self)
        except BaseException as error:
            if not (isinstance(error, WeightSyncError) and error.reason is Reason.APPLY_RESTORED):
                self.course.note(self.name, "left")
            raise

    async def drop(self, *_: object) -> None:
        self.course.note(self.name, "dropped")


class Journal:
    def __init__(self, course: Course) -> None:
        self.course = course
        self.fails = {event: course.chance.random() < 0.1 for event in ("INTENT", "COMMIT")}

    async def _append(self, event: str) -> None:
        await asyncio.sleep(0.01)
        if self.fails.pop(event, False):
            raise WeightSyncError(Reason.DISK_EXHAUSTED, f"{event} cannot be written")
        self.course.note("journal", event)

    async def intent(self, _: object) -> None:
        await self._append("INTENT")

    async def commit(self, _: object) -> None:
        await self._append("COMMIT")

    async def restored(self, *_: object) -> None:
        await self._append("RESTORED")


Together = Callable[[list[EnginePlan], Any, Course], Coroutine[None, None, object]]


def course(seed: int, together: Together) -> Course:
    """Have engines go together; `seed` says how many, what takes how long and what fails."""
    made = Course(random.Random(seed))
    engines = [Engine(name, made) for name in "abcd"[: made.chance.randint(1, 4)]]
    journal, cut = Journal(made), made.chance.uniform(0, 40)
    target = SimpleNamespace(apply_id="a", digest="d", record=SimpleNamespace(version=2))
    plan = SimpleNamespace(target=target, base=None, gate=None)

    async def run() -> None:
        members = [LocalEngine(*cast("Any", (one, None, None))) for one in engines]
        plans = [EnginePlan(one, cast("Any", plan)) for one in members]
        task = asyncio.create_task(together(plans, journal, made))
        await asyncio.wait({task}, timeout=cut)
        task.cancel()
        await asyncio.wait({task})
        end = "cancelled" if task.cancelled() else repr(task.exception() or task.result())
        made.note("host", end)
        await asyncio.sleep(10)

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(run())
    return made


async def decides_alone(plans: list[EnginePlan], journal: Any, _: Course) -> object:
    return await switch_together(plans, journal)


async def asks_its_fleet(plans: list[EnginePlan], journal: Any, made: Course) -> object:
    """Stand still until the fleet has decided, as `HostCutover` does."""
    word, after_s = made.chance.choice(list(Verdict)), made.chance.uniform(0, 5)
    ledger = JournalLedger(plans, journal, fleet_s=60.0)
    await ledger.begin()
    try:
        verdict = await ledger.decidable()
        if verdict is Verdict.COMMIT:
            made.note("host", "ready")
            await asyncio.sleep(after_s)
            made.note("host", f"hears {word}")
            verdict = word
        await ledger.decide(verdict, "the fleet has decided against it")
        return await ledger.ended()
    finally:
        await ledger.close()


@pytest.mark.parametrize("together", [decides_alone, asks_its_fleet])
def test_whatever_fails_all_serve_the_version_or_none(together: Together) -> None:
    kinds = set()
    for seed in SEEDS:
        try:
            made = course(seed, together)
            _check(made)
        except BaseException as error:
            error.add_note(f"with seed {seed}")
            raise
        kinds |= {what.partition("(")[0] for who, what in _ends(made) if who == "host"}
        kinds |= {what for who, what in _ends(made) if who != "host"}
    assert kinds >= {"serves new", "serves old", "left", "dropped", "cancelled", "WeightSyncError"}


def _ends(made: Course) -> set[tuple[str, str]]:
    return {(who, what) for _, who, what in made.seen}


def _check(made: Course) -> None:
    names = {who for _, who, _ in made.seen} - {"journal", "host"}
    new, old, left = made.who("serves new"), made.who("serves old"), made.who("left")
    assert not (new and old), "one serves the version and another one what was before"
    assert not (new | old) & left, "one that serves is given up"
    assert new | old | left | made.who("dropped") == names, "one stands still for ever"
    decided = made.times("COMMIT")
    assert len(decided) <= 1
    if writing := made.times("writing"):
        assert made.who("still") == names, "one is written before all stand still"
        assert max(made.times("still")) <= min(writing)
    if new:
        assert made.who("proved") == names, "one goes on before all are proved"
        assert decided, "one goes on before it is decided"
        assert max(made.times("proved")) <= decided[0] <= min(made.times("serves new"))
    assert not (decided and old), "one goes back after the decision"
    if made.times("RESTORED"):
        assert old == names, "it is written that all went back, and one did not"
    if made.times("hears ABORT"):
        assert not decided, "the fleet has decided against it"


def test_a_decision_that_is_begun_is_made_whoever_is_cancelled() -> None:
    made = Course(random.Random(0))
    journal = Journal(made)
    journal.fails = {"COMMIT": True}

    async def run() -> None:
        target = SimpleNamespace(apply_id="a", digest="d", record=SimpleNamespace(version=2))
        engine = Engine("a", made)
        engine.fails, engine.unproved = set(), False
        plan = SimpleNamespace(target=target, base=None, gate=None)
        member = LocalEngine(*cast("Any", (engine, None, None)))
        ledger = JournalLedger([EnginePlan(member, cast("Any", plan))], cast("Any", journal), 60.0)
        await ledger.begin()
        assert await ledger.decidable() is Verdict.COMMIT
        deciding = asyncio.create_task(ledger.decide(Verdict.COMMIT))
        await asyncio.sleep(0.1)
        deciding.cancel()
        await ledger.close()
        await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(run())
    assert made.times("COMMIT")
    assert made.who("left") == {"a"}
