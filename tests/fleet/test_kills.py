"""Fleets of processes over real registers: members and coordinators are killed and frozen in every
phase, etcd loses its leader and its quorum.

However it ends, all hosts serve what the register says was decided, and no host of a barrier has
served the old version once others could have the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.etcd import Etcd
from tests.support.fleet_hosts import FileHost, coordinator_process, member_process
from tests.support.processes import state
from weightsync.errors import WeightSyncError
from weightsync.failpoints import VARIABLE
from weightsync_server.fleet.decision import decide
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_keys import MEMBERS
from weightsync_server.fleet.fleet_plan import Kind, Verdict
from weightsync_server.register import open_register

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightsync_server.fleet.fleet_history import Apply
    from weightsync_server.register.register import Register

pytestmark = pytest.mark.timeout(120)

NAMES = ("a", "b", "c")
LIMITS = {
    "undecided_s": 3.0,
    "member_ttl_s": 2,
    "grace_s": 0.5,
    "prepare_s": 10.0,
    "settle_s": 10.0,
    "retry_s": 0.2,
    "poll_s": 0.2,
}


class Site:
    """Three members as processes.

    Args:
        url: Of the register.
        folder: Of hosts and journals.
    """

    def __init__(self, url: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self.url, self._folder, self._stack = url, folder, stack
        self.hosts = {name: FileHost(folder / name) for name in NAMES}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, plan: str = "") -> None:
        self.processes[name] = self._stack.enter_context(
            member_process(self.url, self._folder / name, LIMITS, os.environ | {VARIABLE: plan})
        )

    @contextlib.contextmanager
    def coordinator(self, number: int, kind: Kind, plan: str = "") -> Iterator[Popen]:
        with coordinator_process(
            self.url, number, kind, LIMITS, os.environ | {VARIABLE: plan}
        ) as process:
            yield process

    @property
    def serving(self) -> list[int]:
        return [self.hosts[name].serves for name in NAMES]

    async def until_serving(self, *wanted: int) -> None:
        while self.serving != list(wanted):  # noqa: ASYNC110 - files are looked at
            await asyncio.sleep(0.05)

    def check_barrier(self, number: int) -> None:
        """See that no host went back from standing still to an older version than was decided."""
        for host in self.hosts.values():
            log = host.log
            last = max(at for at, (what, _) in enumerate(log) if what in ("begin", "pause"))
            assert all(served in (0, number) for _, served in log[last + 1 :]), log


Popen = subprocess.Popen[str]


@pytest.fixture(scope="module")
def one_etcd(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    cluster = Etcd(etcd, tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture(params=["folder", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return (tmp_path / "register").as_uri()
    return str(request.getfixturevalue("one_etcd").url(f"fleet/{secrets.token_hex(8)}"))


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[type[Site]]:
    with contextlib.ExitStack() as stack:
        yield lambda url: Site(url, tmp_path / "hosts", stack)  # type: ignore[misc]  # a maker


@pytest.fixture
def site(url: str, make_site: type[Site]) -> Site:
    return make_site(url)  # type: ignore[call-arg]  # a maker


async def members_there(register: Register) -> None:
    while len(await register.list(MEMBERS)) < len(NAMES):  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.05)


async def decided(register: Register) -> Apply:
    """Return the newest apply once it is decided."""
    reader = HistoryReader(register)
    while True:
        with contextlib.suppress(WeightSyncError):
            newest = (await reader.read()).newest
            if newest is not None and newest.outcome is not None:
                return newest
        await asyncio.sleep(0.05)


async def until_fenced(site: Site) -> None:
    while any(host.log[-1][0] != "fence" for host in site.hosts.values()):  # noqa: ASYNC110 - files
        await asyncio.sleep(0.05)


async def until_stopped(process: Popen) -> None:
    while state(process.pid) != "T":  # noqa: ASYNC110 - a process is looked at
        await asyncio.sleep(0.02)


async def ended(process: Popen) -> int:
    return await asyncio.to_thread(process.wait)


#: What a coordinator that dies there has decided.
COORDINATOR = {
    "fleet.planned": Verdict.ABORT,
    "fleet.coordinate": Verdict.ABORT,
    "fleet.decide": Verdict.ABORT,
    "fleet.decided": Verdict.COMMIT,
    "fleet.coordinated": Verdict.COMMIT,
}


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("point", COORDINATOR)
async def test_a_coordinator_is_killed(site: Site, point: str, kind: Kind) -> None:
    register = open_register(site.url)
    for name in NAMES:
        site.start(name)
    await members_there(register)
    with site.coordinator(2, kind, f"{point}=panic") as process:
        assert await ended(process) == -signal.SIGKILL
    apply = await decided(register)
    # Of a rolling one it had decided on the first wave alone.
    outcome = COORDINATOR[point] if kind is Kind.BARRIER else Verdict.ABORT
    assert apply.outcome is outcome
    number = 2 if outcome is Verdict.COMMIT else 1
    await site.until_serving(number, number, number)
    if kind is Kind.BARRIER:
        site.check_barrier(number)
    with site.coordinator(3, kind) as process:
        assert await ended(process) == 0
    await site.until_serving(3, 3, 3)
    await register.close()


#: Where a member dies, and whether a barrier goes on without it.
MEMBER = {
    "fleet.prepare": Verdict.ABORT,
    "fleet.pause": Verdict.ABORT,
    "fleet.paused": Verdict.ABORT,
    "fleet.commit": Verdict.COMMIT,
    "fleet.committed": Verdict.COMMIT,
}


@pytest.mark.parametrize("point", MEMBER)
@pytest.mark.parametrize("how", ["panic", pytest.param("stop", marks=pytest.mark.battery)])
async def test_a_member_dies_or_freezes_in_a_barrier(site: Site, point: str, how: str) -> None:
    register = open_register(site.url)
    site.start("a")
    site.start("b", f"{point}=1*{how}")
    site.start("c")
    await members_there(register)
    with site.coordinator(2, Kind.BARRIER) as coordinator:
        apply = await decided(register)
        assert apply.outcome is MEMBER[point]
        number = 2 if apply.outcome is Verdict.COMMIT else 1
        if how == "panic":
            assert await ended(site.processes["b"]) == -signal.SIGKILL
            site.start("b")
        else:
            await until_stopped(site.processes["b"])
            site.processes["b"].send_signal(signal.SIGCONT)
        await site.until_serving(number, number, number)
        site.check_barrier(number)
        assert await ended(coordinator) == 0
    await register.close()


@pytest.mark.parametrize("point", ["fleet.prepare", "fleet.commit", "fleet.committed"])
async def test_a_member_dies_in_its_wave(site: Site, point: str) -> None:
    register = open_register(site.url)
    site.start("a")
    site.start("b", f"{point}=1*panic")
    site.start("c")
    await members_there(register)
    with site.coordinator(2, Kind.ROLLING) as coordinator:
        assert await ended(site.processes["b"]) == -signal.SIGKILL
        site.start("b")
        # It takes up where it was, in time for its wave.
        assert await ended(coordinator) == 0
        assert coordinator.stdout is not None
        assert coordinator.stdout.read().startswith("COMMIT")
    await site.until_serving(2, 2, 2)
    await register.close()


@pytest.fixture
def three(etcd: str, tmp_path: Path) -> Iterator[Etcd]:
    cluster = Etcd(etcd, tmp_path, 3)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
async def test_etcds_leader_leaves_while_hosts_stand_still(
    three: Etcd, make_site: type[Site], how: signal.Signals
) -> None:
    site = make_site(three.url("fleet/one"))  # type: ignore[call-arg]  # a maker
    register = open_register(site.url, timeout_s=40)
    for name in NAMES:
        site.start(name)
    await members_there(register)
    with site.coordinator(2, Kind.BARRIER, "fleet.coordinate=1*sleep(0.5)") as process:
        await site.until_serving(0, 0, 0)
        three.signal(three.leader(), how)
        apply = await decided(register)
        number = 2 if apply.outcome is Verdict.COMMIT else 1
        await site.until_serving(number, number, number)
        site.check_barrier(number)
        await ended(process)
    await register.close()


async def test_etcd_loses_its_quorum_while_hosts_stand_still(
    three: Etcd, make_site: type[Site]
) -> None:
    site = make_site(three.url("fleet/one"))  # type: ignore[call-arg]  # a maker
    register = open_register(site.url, timeout_s=40)
    for name in NAMES:
        site.start(name)
    await members_there(register)
    with site.coordinator(2, Kind.BARRIER, "fleet.coordinate=1*sleep(2)"):
        await site.until_serving(0, 0, 0)
        leader = three.leader()
        lost = [number for number in range(3) if number != leader]
        for number in lost:
            three.signal(number, signal.SIGKILL)
        # Nobody can know: each fences itself, and stays so.
        await until_fenced(site)
        await asyncio.sleep(1)
        assert site.serving == [0, 0, 0]
        for number in lost:
            three.start(number)
        apply = await decided(register)
        number = 2 if apply.outcome is Verdict.COMMIT else 1
        await site.until_serving(number, number, number)
        site.check_barrier(number)
    await register.close()


async def test_16_racing_deciders_agree_on_etcd(one_etcd: Etcd) -> None:
    url = one_etcd.url(f"fleet/{secrets.token_hex(8)}")
    racers = [open_register(url) for _ in range(16)]
    for number in range(1, 31):
        verdicts = [Verdict.COMMIT if at % 2 else Verdict.ABORT for at in range(16)]
        found = await asyncio.gather(
            *(
                decide(one, number, 1, verdict, f"m{at}")
                for at, (one, verdict) in enumerate(zip(racers, verdicts, strict=True))
            )
        )
        assert len(set(found)) == 1
    for one in racers:
        await one.close()
