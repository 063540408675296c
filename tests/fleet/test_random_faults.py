"""A fleet under faults at random: links cut, members killed, hosts that refuse, coordinators gone.

All the while no host of a barrier serves anything but what the newest COMMIT says, and when the
faults end all hosts serve it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import LIMITS as FAST
from tests.support.fleet_tasks import Fleet, until
from weightsync.errors import WeightSyncError
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_plan import Kind

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)

NAMES = ("a", "b", "c")
LIMITS = replace(FAST, prepare_s=2.0, settle_s=1.0)
ROUNDS = 10


class Chaos:
    """Faults, and an observer.

    Args:
        fleet: What they meet.
        seed: Of all choices.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._random = fleet, random.Random(seed)
        self.commits = self.aborts = 0
        self.violations: list[str] = []

    async def round(self, number: int) -> None:
        """Apply a version while something happens."""
        choose = self._random
        kind = choose.choice(list(Kind))
        applying = asyncio.create_task(self._apply(number, kind))
        for _ in range(choose.randrange(2)):
            await asyncio.sleep(choose.random() * 0.3)
            await choose.choice([self._cut, self._kill, self._refuse, self._abandon])(applying)
        await asyncio.wait({applying}, timeout=8)
        applying.cancel()
        await asyncio.wait({applying})
        await self.mend()

    async def mend(self) -> None:
        """End all faults."""
        for name in NAMES:
            self._fleet.links[name].cut = False
            self._fleet.hosts[name].refuses = set()
            if name not in self._fleet.members:
                await self._fleet.start(name, limits=LIMITS)

    async def watch(self) -> None:
        """See that no host of a barrier serves what was left, until cancelled."""
        reader = HistoryReader(self._fleet.register)
        while True:
            history = await reader.read()
            serving = self._fleet.serving
            commits = history.commits
            if commits and history.newest is commits[-1] and history == await reader.read():
                plan = commits[-1].plan
                if plan.kind is Kind.BARRIER:
                    self.violations += [
                        f"{name} serves {serving[name]} after {plan}"
                        for name in plan.members
                        if serving[name] not in (0, plan.target.number)
                    ]
            await asyncio.sleep(0.005)

    async def _apply(self, number: int, kind: Kind) -> None:
        try:
            outcome = await self._fleet.coordinator(LIMITS).apply(version(number), kind)
        except WeightSyncError:
            return
        if outcome.reason:
            self.aborts += 1
        else:
            self.commits += 1

    async def _cut(self, _: asyncio.Task[None]) -> None:
        link = self._fleet.links[self._random.choice(NAMES)]
        link.cut = True
        if self._random.random() < 0.7:
            await asyncio.sleep(self._random.random() * 1.5)
            link.cut = False

    async def _kill(self, _: asyncio.Task[None]) -> None:
        name = self._random.choice(NAMES)
        if name in self._fleet.members:
            await self._fleet.kill(name)
            if self._random.random() < 0.7:
                await self._fleet.start(name, limits=LIMITS)

    async def _refuse(self, _: asyncio.Task[None]) -> None:
        host = self._fleet.hosts[self._random.choice(NAMES)]
        host.refuses = {self._random.choice(["prepare", "pause", "commit"])}

    async def _abandon(self, applying: asyncio.Task[None]) -> None:
        applying.cancel()


@pytest.mark.parametrize("seed", range(2))
async def test_it_ends_on_what_was_decided(tmp_path: Path, seed: int) -> None:
    fleet = Fleet(tmp_path)
    await fleet.start(*NAMES, limits=LIMITS)
    chaos = Chaos(fleet, seed)
    watching = asyncio.create_task(chaos.watch())
    for number in range(2, 2 + ROUNDS):
        await chaos.round(number)
        assert not chaos.violations
        assert not watching.done()
    watching.cancel()
    await asyncio.wait({watching})
    reader = HistoryReader(fleet.register)
    while (await reader.read()).running is not None:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.05)
    target = (await reader.read()).target
    wanted = target.number if target else 1
    await until(lambda: set(fleet.serving.values()) == {wanted})
    assert chaos.commits
    await fleet.close()
