"""Hosts without weights for tests of fleets, and members and coordinators as processes.

A host is a file that outlives its member, as engines outlive their server: what it holds and
whether it serves. Each change is added to a log beside it.

Run as a program: `member URL NAME FOLDER LIMITS` follows until it is killed; `coordinator URL
VERSION KIND LIMITS` applies, prints the outcome and ends. LIMITS is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination import open_register
from weightsync_server.decide import ApplyOrder, FleetVersion
from weightsync_server.fleet.coordinator import Coordinator
from weightsync_server.fleet.fleet_member import FleetMember
from weightsync_server.fleet.fleet_settings import FleetLimits
from weightsync_server.fleet.member_journal import MemberJournal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from weightsync.engine import PauseSpec
    from weightsync_server.coordination.coordination import CoordinationStore

__all__ = ["FileHost", "coordinator_process", "make_member", "member_process", "version"]


def version(number: int) -> FleetVersion:
    """Return a version with a content of its own."""
    return FleetVersion(number, f"{number:032x}")


class FileHost:
    """A host in a folder.

    Args:
        folder: Made when missing.

    Attributes:
        name: Of the folder.
        refuses: What to refuse: `prepare`, `pause`, `commit`, or a mode to pause in.
        gate: Where it is given, `prepare` waits for it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = folder.name
        self._state, self._log = folder / "state.json", folder / "log"
        self.refuses: set[str] = set()
        self.gate: asyncio.Event | None = None
        if not self._state.exists():
            self._change("begin", live=[1, version(1).digest], serving=True, rejected=[])

    async def prepare(self, target: FleetVersion, pause: PauseSpec | None = None) -> None:
        if pause is not None and pause.mode in self.refuses:
            raise WeightSyncError(Reason.ENGINE_REFUSED, f"no engine here can {pause.mode}")
        if self.gate is not None:
            await self.gate.wait()
        self._refuse("prepare")
        if target.digest in self._read()["rejected"]:
            raise WeightSyncError(Reason.VERSION_REJECTED, "it was rejected")
        await asyncio.sleep(0)

    async def pause(self) -> None:
        self._refuse("pause")
        self._change("pause", serving=False)

    async def commit(self, target: FleetVersion) -> None:
        if "commit" in self.refuses:
            self._change("fail", serving=False)
        self._refuse("commit")
        self._change("commit", live=[target.number, target.digest], serving=True)

    async def resume(self) -> None:
        self._change("resume", serving=True)

    async def fence(self, reason: str) -> None:
        self._change("fence", serving=False, reason=reason)

    async def reject(self, digest: str, reason: str = "") -> None:
        rejected = [*self._read()["rejected"], digest]
        self._change("reject", rejected=rejected, rejected_reason=reason)

    async def accept(self, digest: str) -> None:
        kept = [one for one in self._read()["rejected"] if one != digest]
        self._change("accept", rejected=kept)

    def live(self) -> FleetVersion | None:
        live = self._read()["live"]
        return FleetVersion(*live) if live else None

    @property
    def serves(self) -> int:
        """The number that it serves; 0: none."""
        state = self._read()
        return int(state["live"][0]) if state["serving"] else 0

    @property
    def rejected(self) -> list[str]:
        return list(self._read()["rejected"])

    @property
    def rejected_reason(self) -> str:
        return str(self._read()["rejected_reason"])

    @property
    def log(self) -> list[tuple[str, int]]:
        """What was done to it, each with the number that it served afterwards; 0: none."""
        lines = (json.loads(line) for line in self._log.read_text().splitlines())
        return [(what, number) for what, number in lines]

    def _refuse(self, what: str) -> None:
        if what in self.refuses:
            raise WeightSyncError(Reason.ENGINE_REFUSED, f"{what} is refused")

    def _read(self) -> dict[str, Any]:
        return dict(json.loads(self._state.read_text()))

    def _change(self, what: str, **fields: Any) -> None:
        state = (self._read() if self._state.exists() else {}) | fields
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(self._state)
        with self._log.open("a") as log:
            log.write(json.dumps([what, state["live"][0] if state["serving"] else 0]) + "\n")


def make_member(register: CoordinationStore, folder: Path, limits: FleetLimits) -> FleetMember:
    """Return a member whose host and journal are in a folder, and whose name is the folder's."""
    host = FileHost(folder)
    return FleetMember(register, folder.name, host, MemberJournal(folder / "journal.json"), limits)


@contextlib.contextmanager
def member_process(
    url: str, folder: Path, limits: Mapping[str, float], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a member until the end of the block."""
    with _process(["member", url, str(folder), json.dumps(limits)], environment) as process:
        yield process


@contextlib.contextmanager
def coordinator_process(
    url: str,
    number: int,
    kind: ApplyOrder,
    limits: Mapping[str, float],
    environment: Mapping[str, str],
) -> Iterator[subprocess.Popen[str]]:
    """Run a coordinator; its output is the outcome."""
    command = ["coordinator", url, str(number), kind.value, json.dumps(limits)]
    with _process(command, environment) as process:
        yield process


@contextlib.contextmanager
def _process(
    arguments: list[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.fleet_hosts", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=dict(environment),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def _member(url: str, folder: Path, limits: FleetLimits) -> None:
    await make_member(open_register(url, timeout_s=3), folder, limits).run()


async def _coordinate(url: str, number: int, kind: ApplyOrder, limits: FleetLimits) -> None:
    coordinator = Coordinator(open_register(url, timeout_s=3), "coordinator", limits)
    outcome = await coordinator.apply(version(number), kind)
    print(f"{outcome.verdict} {outcome.reason}", flush=True)  # noqa: T201 - what the starter reads


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    given = FleetLimits(**json.loads(rest[-1]))
    if role == "member":
        asyncio.run(_member(where, Path(rest[0]), given))
    else:
        asyncio.run(_coordinate(where, int(rest[0]), ApplyOrder(rest[1]), given))
