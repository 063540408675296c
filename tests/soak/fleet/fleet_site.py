"""The processes of a fleet and the links between them, each of which can be broken by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.soak.site import MemoryEngineProcess
from tests.support.etcd import Etcd
from tests.support.leftovers import Mark
from tests.support.object_proxy import object_proxy
from tests.support.object_servers import moto
from tests.support.proxy import FaultProxy, Faults
from tests.support.weightsync_server import WeightSyncServer
from weightsync import failpoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["FleetServer", "FleetSite", "Member"]

MEMBERS = ("m0", "m1", "m2")
#: Serves on without the register: nothing but what it reads keeps it from what was left.
UNLIMITED = "m2"
ORIGIN = "origin"
FLEET, PREFIX = "soak", "weightsync"
STORE = "s3://weights/prod"
UNDECIDED_S, MAX_AGE_S = 3.0, 3.0
#: However busy the machine is.
_START_S = 120.0
#: Until what has ended at its start is started again, as a supervisor does; seconds.
_AGAIN_S = 1.0
_COMMON = ("--fetchers", "1", "--slots", "3", "--memory-bytes", "64000000", "--metrics", "")
#: What is behind a barrier or any rolling apply is never served for long: no skew is allowed.
_MEMBER = (
    "--follow-interval-s", "0.3", "--undecided-limit-s", f"{UNDECIDED_S:g}",
    "--max-skew", "0", "--member-ttl-s", "1",
    "--pause-lease-s", "5", "--commit-timeout-s", "5", "--prepare-timeout-s", "15",
)  # fmt: skip


class FleetServer:
    """A server that can be killed, stopped and started again.

    Args:
        name: Its name.
        folder: Of its sockets and state; a short path.
        flags: More flags.
        variables: More environment variables.

    Attributes:
        name: As given.
        server: The server.
        plan: Its failpoints' plan file.
        starts: How often it was started.
    """

    def __init__(
        self, name: str, folder: Path, flags: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        folder.mkdir()
        self.name, self.starts = name, 0
        self.plan = folder / "plan"
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=[*_COMMON, *flags],
            variables={**variables, failpoints.VARIABLE: f"@{self.plan}"},
            start_s=_START_S,
            ingest=0,
        )

    @property
    def pid(self) -> int:
        """Its process id; 0: it does not run."""
        process = self.server.process
        return process.pid if process is not None and process.poll() is None else 0

    @property
    def ingest_address(self) -> str:
        """Where a trainer's streams may go, too."""
        return self.server.address

    def start(self, wrapper: Sequence[str] = ()) -> None:
        """Return when it answers; one that does not start without its store is started again."""
        self.server.wrapper = wrapper
        end = time.monotonic() + _START_S
        while True:
            self.starts += 1
            try:
                self.server.start()
                return
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(_AGAIN_S)

    def kill(self) -> None:
        """End it as a crash does."""
        self.server.kill()

    def stop_for(self, seconds: float) -> None:
        """Let it stand still for so long."""
        self.send(signal.SIGSTOP)
        time.sleep(seconds)
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            if self.pid:
                os.kill(self.pid, number)

    def arm(self, plan: str) -> None:
        """Have it do something at failpoints; empty: nothing."""
        fresh = self.plan.with_suffix(".new")
        fresh.write_text(plan)
        fresh.replace(self.plan)

    def hits(self) -> int:
        """Return how often it did."""
        path = self.plan.with_name("plan.hits")
        return len(path.read_text().splitlines()) if path.exists() else 0


class Member(FleetServer):
    """A follower that is a member, with its engine.

    Attributes:
        engine: The engine.
        etcd_links: One to each of etcd's members.
        origin_link: Where its versions come from.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        flags: Sequence[str],
        variables: Mapping[str, str],
        links: tuple[list[FaultProxy], FaultProxy],
    ) -> None:
        self.etcd_links, self.origin_link = links
        addresses = ",".join(link.address for link in self.etcd_links)
        register = f"etcd://{addresses}/{PREFIX}"
        fleet = ("--fleet", FLEET, "--fleet-register", register, "--fleet-member", name)
        limit = () if name == UNLIMITED else ("--max-age-s", f"{MAX_AGE_S:g}")
        super().__init__(name, folder, [*_MEMBER, *limit, *fleet, *flags], variables)
        self.server.run_dir.mkdir()
        self.engine = MemoryEngineProcess(self.server.run_dir)


class FleetSite:
    """An origin, its members, etcd and a store. Everything starts here and ends in `stop`.

    Args:
        folder: Of all files; a short path.
        etcd: The binary.

    Attributes:
        etcd: Three members of etcd.
        store_pid: The store's process.
        store: The proxy before the store, which all requests take.
        store_link: What all connections to the store go through.
        store_links: One more for each server that uses it; the third member follows the origin.
        origin: Takes pushes.
        members: By name.
    """

    def __init__(self, folder: Path, etcd: str) -> None:
        self._stack = contextlib.ExitStack()
        self._links: list[FaultProxy] = []
        self.mark = Mark()
        os.environ.update(self.mark.variables)
        for name in ("etcd", "store"):
            (folder / name).mkdir()
        self.etcd = Etcd(etcd, folder / "etcd", 3)
        self._stack.callback(self.etcd.close)
        store = self._stack.enter_context(moto(folder / "store"))
        self.store_pid = store.pid
        self.store = self._stack.enter_context(object_proxy(store.port))
        self.store_link = self._link(f"127.0.0.1:{self.store.port}")
        users = (ORIGIN, *MEMBERS[:-1])
        self.store_links = {name: self._link(self.store_link.address) for name in users}

        def variables(name: str) -> dict[str, str]:
            port = int(self.store_links[name].address.rpartition(":")[2])
            return dict(store.environment(port))

        flags = ("--engine", "none", "--store", STORE, "--retain-versions", "100000")
        self.origin = FleetServer(ORIGIN, folder / "o", flags, variables(ORIGIN))
        self.members: dict[str, Member] = {}
        for name in MEMBERS:
            etcd_links = [self._link(address) for address in self.etcd.addresses]
            if name in self.store_links:
                links = etcd_links, self.store_links[name]
                follow, given = STORE, variables(name)
            else:
                links = etcd_links, self._link(self.origin.server.address)
                follow, given = f"grpc://{links[1].address}", {}
            self.members[name] = Member(name, folder / name, ("--follow", follow), given, links)

    @property
    def servers(self) -> list[FleetServer]:
        """The origin and all members."""
        return [self.origin, *self.members.values()]

    def start(self) -> None:
        """Return when every server answers and every engine listens."""
        self.origin.start()
        works = [work for one in self.members.values() for work in (one.start, one.engine.start)]
        with ThreadPoolExecutor(len(works)) as pool:
            for done in [pool.submit(work) for work in works]:
                done.result()

    def heal(self) -> None:
        """End what faults have left: nothing is dead, stopped or cut afterwards."""
        for link in self._links:
            link.faults = Faults()
        for one in self.servers:
            one.arm("")
            one.send(signal.SIGCONT)
            if not one.pid:
                one.start()

    def stop(self) -> list[str]:
        """End everything; returns what is still alive afterwards."""
        stopping = [threading.Thread(target=one.server.kill) for one in self.servers]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        for member in self.members.values():
            member.engine.stop()
        for link in self._links:
            link.close()
        self._stack.close()
        return self.mark.left_after(10)

    def keep_logs(self, folder: Path, seed: int) -> None:
        """Copy the logs of all servers."""
        for one in self.servers:
            shutil.copy(one.server.run_dir / "server.log", folder / f"{one.name}-{seed}.log")

    def _link(self, target: str) -> FaultProxy:
        link = FaultProxy(target)
        self._links.append(link)
        return link
