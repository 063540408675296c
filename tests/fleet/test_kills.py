"""Fleets of processes over real registers: members and coordinators are killed and frozen in every
phase, etcd loses its leader and its quorum.

However it ends, all hosts serve what the register says was decided, and no host of a barrier has
served the old version once others could have the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.etcd import Etcd
from tests.support.fleet_hosts import FileHost, coordinator_process, member_process, version
from tests.support.processes import state
from weightsync.errors import WeightSyncError
from weightsync.failpoints import VARIABLE
from weightsync_server.coordination import open_register
from weightsync_server.decide import ApplyOrder, Verdict
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_records import MEMBERS, decode_boot
from weightsync_server.fleet.fleet_settings import FleetLimits
from weightsync_server.fleet.member_journal import MemberJournal
from weightsync_server.fleet_host.fleet_status import list_member

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from weightsync_server.coordination.coordination import CoordinationStore

pytestmark = pytest.mark.timeout(120)

NAMES = ("a", "b", "c")
PLACES = ("folder", "etcd")
LIMITS: dict[str, Any] = {
    # Of half of it a coordinator lets a barrier stand still.
    "undecided_s": 6.0,
    "member_ttl_s": 2,
    "grace_s": 0.5,
    "prepare_s": 10.0,
    "settle_s": 10.0,
    "retry_s": 0.2,
    "poll_s": 0.2,
}
#: Longer than any election on a busy host.
PATIENCE_S = 40.0


@dataclasses.dataclass
class Newcomer:
    """A member that is in no apply; the first `lines` of its host's log are of before it came."""

    host: FileHost
    process: Popen
    lines: int

    @property
    def served(self) -> set[int]:
        return {number for _, number in self.host.log[self.lines :]} - {0}


class Site:
    """Three members as processes, which tests kill, and a plan of faults for each.

    Args:
        url: Of the register.
        folder: Of hosts, journals and plans.
        stack: Ends the processes.

    Attributes:
        register: The test's own.
        before: What all served when the test began.
        number: Of the version that the test applies.
    """

    register: CoordinationStore
    before: int

    def __init__(self, url: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self.url, self._folder, self._stack = url, folder, stack
        self.hosts = {name: FileHost(folder / name) for name in NAMES}
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.number = 1
        self._boots: dict[str, str] = {}
        #: Whose key in the register may be that of a process that was killed.
        self._started: set[str] = set()
        self._lines: dict[str, int] = {}

    def start(self, name: str) -> None:
        """Start a member that has no faults."""
        self.arm(name, "")
        environment = os.environ | {VARIABLE: f"@{self._plan(name)}"}
        self.processes[name] = self._stack.enter_context(
            member_process(self.url, self._folder / name, LIMITS, environment)
        )
        self._started.add(name)

    def arm(self, name: str, plan: str) -> None:
        self._plan(name).write_text(plan)

    def _plan(self, name: str) -> Path:
        return self._folder / f"{name}.plan"

    async def begin(self) -> None:
        """Begin a test: all members are there and serve what was decided."""
        for name in NAMES:
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                self.start(name)
            self.arm(name, "")
        while not await self._are_there():  # noqa: ASYNC110 - a register is asked
            await asyncio.sleep(0.05)
        reader = HistoryReader(self.register)
        while (history := await reader.read()).running is not None:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
        self.before = history.target.number if history.target else 1
        await self.until_serving(self.before)
        self.number += 1
        self._lines = {name: len(host.log) for name, host in self.hosts.items()}

    async def _are_there(self) -> bool:
        """Whether the members in the register are the processes that run."""
        found = await self.register.list(MEMBERS)
        boots = {key.rpartition("/")[2]: decode_boot(value) for key, value in found.items()}
        if boots.keys() != set(NAMES):
            return False
        if any(boots[name] == self._boots.get(name) for name in self._started):
            return False
        self._boots = boots
        self._started.clear()
        return True

    @contextlib.contextmanager
    def coordinator(self, kind: ApplyOrder, plan: str, **limits: Any) -> Iterator[Popen]:
        """Run one that applies the version, with faults."""
        with coordinator_process(
            self.url, self.number, kind, LIMITS | limits, os.environ | {VARIABLE: plan}
        ) as process:
            yield process

    @contextlib.asynccontextmanager
    async def newcomers(self) -> AsyncIterator[dict[str, Newcomer]]:
        """Start members that serve nothing yet, of which one holds what was decided.

        They have read the register when the block begins.
        """
        with contextlib.ExitStack() as stack:
            found = {}
            for name, holds in (("same", self.before), ("other", self.number + 1000)):
                folder = self._folder / f"{name}{self.number}"
                host = FileHost(folder)
                await host.commit(version(holds))
                await host.fence("it is new")
                await MemberJournal(folder / "journal.json").stop(0)
                lines = len(host.log)
                process = stack.enter_context(member_process(self.url, folder, LIMITS, os.environ))
                found[folder.name] = Newcomer(host, process, lines)
            for name in found:
                while not await self._has_read(name):  # noqa: ASYNC110 - a register is asked
                    await asyncio.sleep(0.05)
            yield found

    async def _has_read(self, name: str) -> bool:
        value = (await self.register.list(MEMBERS)).get(f"{MEMBERS}{name}")
        return value is not None and not list_member(name, value).reason.startswith("it asks:")

    async def apply(self, kind: ApplyOrder, **limits: Any) -> Verdict:
        """Apply the version, as a coordinator that nothing befalls."""
        coordinator = Coordinator(self.register, "coordinator", FleetLimits(**LIMITS | limits))
        return (await coordinator.apply(version(self.number), kind)).verdict

    async def decided(self) -> Verdict:
        """Return what was decided on the version once it is."""
        reader = HistoryReader(self.register)
        while True:
            with contextlib.suppress(WeightSyncError):
                newest = (await reader.read()).newest
                if newest and newest.plan.target.number == self.number and newest.outcome:
                    return newest.outcome
            await asyncio.sleep(0.05)

    @property
    def serving(self) -> set[int]:
        return {host.serves for host in self.hosts.values()}

    async def until_serving(self, wanted: int) -> None:
        while self.serving != {wanted}:  # noqa: ASYNC110 - files are looked at
            await asyncio.sleep(0.05)

    async def until_decided(self) -> Verdict:
        """Return when all hosts of a barrier serve what was decided.

        None of them may have gone back from standing still to an older version than that.
        """
        verdict = await self.decided()
        number = self.number if verdict is Verdict.COMMIT else self.before
        await self.until_serving(number)
        for name, host in self.hosts.items():
            log = host.log[self._lines[name] :]
            pauses = [at for at, (what, _) in enumerate(log) if what == "pause"]
            after = log[pauses[-1] + 1 :] if pauses else log
            assert all(served in (0, number) for _, served in after), log
        return verdict


Popen = subprocess.Popen[str]


@pytest.fixture(scope="module")
def folder_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("folder")
    with contextlib.ExitStack() as stack:
        yield Site((folder / "register").as_uri(), folder, stack)


@pytest.fixture(scope="module")
def etcd_site(one_three: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(one_three.url("fleet/one"), tmp_path_factory.mktemp("hosts"), stack)


@pytest.fixture(params=PLACES)
def one_site(request: pytest.FixtureRequest) -> Site:
    found: Site = request.getfixturevalue(f"{request.param}_site")
    return found


@pytest.fixture
async def site(one_site: Site) -> AsyncIterator[Site]:
    one_site.register = open_register(one_site.url, timeout_s=PATIENCE_S)
    await one_site.begin()
    yield one_site
    await one_site.register.close()


on_etcd = pytest.mark.parametrize("one_site", ["etcd"], indirect=True)


async def until_fenced(site: Site) -> None:
    while any(host.log[-1][0] != "fence" for host in site.hosts.values()):  # noqa: ASYNC110 - files
        await asyncio.sleep(0.05)


async def until_stopped(process: Popen) -> None:
    while state(process.pid) != "T":  # noqa: ASYNC110 - a process is looked at
        await asyncio.sleep(0.02)


async def ended(process: Popen) -> int:
    return await asyncio.to_thread(process.wait)


def cells(*each: tuple[str, ...], battery: bool) -> list[Any]:
    """Return these on each register if all are of the battery, or else on one after the other.

    The other halves are of the battery then.
    """
    return [
        pytest.param(place, *cell, marks=pytest.mark.battery)
        if battery or place != PLACES[at % 2]
        else pytest.param(place, *cell)
        for at, cell in enumerate(each)
        for place in PLACES
    ]


#: What a coordinator that dies there has decided.
COORDINATOR = {
    "fleet.planned": Verdict.ABORT,
    "fleet.coordinate": Verdict.ABORT,
    "fleet.decide": Verdict.ABORT,
    "fleet.decided": Verdict.COMMIT,
    "fleet.coordinated": Verdict.COMMIT,
}


@pytest.mark.parametrize(
    ("one_site", "point"),
    cells(*((point,) for point in COORDINATOR), battery=False),
    indirect=["one_site"],
)
async def test_a_coordinator_of_a_barrier_is_killed(site: Site, point: str) -> None:
    with site.coordinator(ApplyOrder.BARRIER, f"{point}=panic") as process:
        assert await ended(process) == -signal.SIGKILL
    assert await site.until_decided() is COORDINATOR[point]
    site.number += 1
    assert await site.apply(ApplyOrder.BARRIER) is Verdict.COMMIT
    await site.until_serving(site.number)


@pytest.mark.parametrize(
    ("one_site", "point"),
    [
        *cells(("fleet.coordinate",), ("fleet.decided",), battery=False),
        *cells(("fleet.planned",), ("fleet.decide",), ("fleet.coordinated",), battery=True),
    ],
    indirect=["one_site"],
)
async def test_a_coordinator_of_waves_is_killed(site: Site, point: str) -> None:
    with site.coordinator(ApplyOrder.ROLLING, f"{point}=panic") as process:
        assert await ended(process) == -signal.SIGKILL
    # It had decided on the first wave alone.
    assert await site.decided() is Verdict.ABORT
    await site.until_serving(site.before)
    site.number += 1
    assert await site.apply(ApplyOrder.ROLLING) is Verdict.COMMIT
    await site.until_serving(site.number)


#: Where a member dies, and whether a barrier goes on without it.
MEMBER = {
    "fleet.prepare": Verdict.ABORT,
    "fleet.pause": Verdict.ABORT,
    "fleet.paused": Verdict.ABORT,
    "fleet.commit": Verdict.COMMIT,
    "fleet.committed": Verdict.COMMIT,
}


@pytest.mark.parametrize(
    ("one_site", "point", "how"),
    [
        *cells(*((point, "panic") for point in MEMBER), battery=False),
        *cells(*((point, "stop") for point in MEMBER), battery=True),
    ],
    indirect=["one_site"],
)
async def test_a_member_dies_or_freezes_in_a_barrier(site: Site, point: str, how: str) -> None:
    site.arm("b", f"{point}=1*{how}")
    applying = asyncio.create_task(site.apply(ApplyOrder.BARRIER))
    assert await site.decided() is MEMBER[point]
    if how == "panic":
        assert await ended(site.processes["b"]) == -signal.SIGKILL
        site.start("b")
    else:
        await until_stopped(site.processes["b"])
        site.processes["b"].send_signal(signal.SIGCONT)
    assert await site.until_decided() is MEMBER[point]
    assert await applying is MEMBER[point]


async def test_a_member_that_freezes_beyond_its_lease_starts_nothing_that_was_left(
    site: Site,
) -> None:
    site.arm("b", "fleet.commit=1*stop")
    assert await site.apply(ApplyOrder.BARRIER, settle_s=0.2) is Verdict.COMMIT
    await until_stopped(site.processes["b"])
    left, lines = site.number, len(site.hosts["b"].log)
    while f"{MEMBERS}b" in await site.register.list(MEMBERS):  # noqa: ASYNC110 - a register
        await asyncio.sleep(0.05)
    site.number += 1
    # The others go on without it.
    assert await site.apply(ApplyOrder.BARRIER, settle_s=0.2) is Verdict.COMMIT
    site.processes["b"].send_signal(signal.SIGCONT)
    await site.until_serving(site.number)
    served = [number for _, number in site.hosts["b"].log[lines:]]
    assert left not in served, served


@pytest.mark.parametrize(
    ("one_site", "point"),
    cells(("fleet.prepare",), ("fleet.commit",), ("fleet.committed",), battery=False),
    indirect=["one_site"],
)
async def test_a_member_dies_in_its_wave(site: Site, point: str) -> None:
    site.arm("b", f"{point}=1*panic")
    # For as long as a process takes to start on a busy machine, nobody is given up.
    applying = asyncio.create_task(site.apply(ApplyOrder.ROLLING, grace_s=30.0, prepare_s=60.0))
    assert await ended(site.processes["b"]) == -signal.SIGKILL
    site.start("b")
    # It takes up where it was, in time for its wave.
    assert await applying is Verdict.COMMIT
    await site.until_serving(site.number)


on_either = pytest.mark.parametrize("one_site", cells((), battery=False), indirect=True)


@contextlib.asynccontextmanager
async def held(site: Site, point: str) -> AsyncIterator[tuple[Popen, dict[str, Newcomer]]]:
    """Hold a barrier's coordinator at a point, and have others come meanwhile."""
    # While it is stopped it stays in the register.
    with site.coordinator(ApplyOrder.BARRIER, f"{point}=1*stop", member_ttl_s=20) as process:
        await until_stopped(process)
        async with site.newcomers() as came:
            yield process, came


async def until_they_serve(came: dict[str, Newcomer], wanted: int) -> None:
    def serves(one: Newcomer) -> bool:
        # A host writes its log after it has begun to serve.
        return one.host.serves == wanted and wanted in one.served

    while not all(map(serves, came.values())):  # noqa: ASYNC110 - files
        await asyncio.sleep(0.05)


@on_either
async def test_those_that_come_before_a_barrier_is_decided_are_of_the_next_one(site: Site) -> None:
    async with held(site, "fleet.coordinate") as (process, came):
        assert site.serving == {0}
        assert [one.served for one in came.values()] == [set(), set()]
        process.send_signal(signal.SIGCONT)
        assert await site.until_decided() is Verdict.ABORT
        await ended(process)
        names = ", ".join(sorted(came))
        assert process.stdout is not None
        assert process.stdout.read() == f"ABORT {names} appeared meanwhile; apply again\n"
        await until_they_serve(came, site.before)
        site.number += 1
        assert await site.apply(ApplyOrder.BARRIER) is Verdict.COMMIT
        assert site.serving == {site.number}
        await until_they_serve(came, site.number)
        assert [one.served for one in came.values()] == 2 * [{site.before, site.number}]


@on_either
async def test_those_that_come_in_a_barrier_and_freeze_serve_nothing_that_it_left(
    site: Site,
) -> None:
    async with held(site, "fleet.coordinate") as (process, came):
        for one in came.values():
            one.process.send_signal(signal.SIGSTOP)
        keys = {f"{MEMBERS}{name}" for name in came}
        while keys & (await site.register.list(MEMBERS)).keys():  # noqa: ASYNC110 - a register
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        # Nobody waits for those that are not there.
        assert await site.until_decided() is Verdict.COMMIT
        assert [one.served for one in came.values()] == [set(), set()]
        for one in came.values():
            one.process.send_signal(signal.SIGCONT)
        await until_they_serve(came, site.number)
        assert [one.served for one in came.values()] == 2 * [{site.number}]
        await ended(process)


@pytest.mark.battery
async def test_those_that_come_after_a_commit_go_to_it_at_once(site: Site) -> None:
    async with held(site, "fleet.decided") as (process, came):
        await until_they_serve(came, site.number)
        assert [one.served for one in came.values()] == 2 * [{site.number}]
        process.send_signal(signal.SIGCONT)
        assert await site.until_decided() is Verdict.COMMIT
        await ended(process)


@on_etcd
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
async def test_etcds_leader_leaves_while_hosts_stand_still(
    three: Etcd, site: Site, how: signal.Signals
) -> None:
    with site.coordinator(ApplyOrder.BARRIER, "fleet.coordinate=1*sleep(0.5)") as process:
        await site.until_serving(0)
        three.signal(three.leader(), how)
        await site.until_decided()
        await ended(process)


@on_etcd
async def test_etcd_loses_its_quorum_while_hosts_stand_still(three: Etcd, site: Site) -> None:
    with site.coordinator(ApplyOrder.BARRIER, "fleet.coordinate=1*sleep(2)"):
        await site.until_serving(0)
        leader = three.leader()
        lost = [number for number in range(3) if number != leader]
        for number in lost:
            three.signal(number, signal.SIGKILL)
        # Nobody can know: each fences itself, and stays so.
        await until_fenced(site)
        await asyncio.sleep(1)
        assert site.serving == {0}
        for number in lost:
            three.start(number)
        await site.until_decided()
