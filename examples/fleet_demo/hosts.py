"""The hosts: weightsync-server with an engine for tests, one process tree and one folder each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from examples.demo.processes import Processes
from examples.fleet_demo.services import Store

__all__ = ["LEASE_S", "Follower", "Origin"]

_FLEET = "demo"
#: After so long the fleet misses a member; 10 s by default, which is long to watch.
LEASE_S = 3
#: Of shared memory for each host; a model of 4 MiB needs far less.
_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True)
class _Host:
    name: str
    folder: Path
    processes: Processes
    store: Store

    @property
    def address(self) -> str:
        """Where its server listens."""
        return f"unix:{self.folder}/server.sock"

    def kill(self) -> None:
        """End server and engine at once, as when the host loses power."""
        self.processes.kill(self.name)

    def _start(self, *flags: str) -> None:
        self.folder.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "weightsync_server.cli", "--name", "demo"),
            *("--listen", self.address, "--metrics", "", "--fetchers", "1"),
            *("--run-dir", f"{self.folder}/run", "--state-dir", f"{self.folder}/state"),
            *("--memory-bytes", str(_MEMORY_BYTES), "--drain-timeout-s", "2", *flags),
        ]
        self.processes.start(self.name, command, self.store.variables)


@dataclass(frozen=True)
class Origin(_Host):
    """The host that takes the pushes and writes them to the store once; it has no engine."""

    def start(self) -> None:
        """Start it; it answers later."""
        self._start("--engine", "none", "--store", self.store.url)


@dataclass(frozen=True)
class Follower(_Host):
    """A host that fetches each version from the store and serves what the fleet has decided.

    Attributes:
        register: Where the fleet decides.
        model: The checkpoint that its engine starts on.
    """

    register: str
    model: Path

    def start(self) -> None:
        """Start it, with all that it had on its disk; it answers later."""
        self._start(
            *("--engine", "memory", "--model", str(self.model), "--ranks", "2"),
            *("--follow", self.store.url, "--fleet", _FLEET, "--fleet-register", self.register),
            *("--fleet-member", self.name, "--member-ttl-s", str(LEASE_S)),
        )
