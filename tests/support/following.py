"""Servers with the engine for tests, each a process of its own, that follow each other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tests.support.scraped import scraped
from tests.support.serving import wait_serving
from weightsync_client import Client, Durability, Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from weightsync_client import Version

__all__ = ["FollowingServer", "checkpoint", "staged", "step", "until"]

_COMMAND = Path(sys.executable).with_name("weightsync-server")
_START_S = 60.0


def checkpoint(seed: int = 1, rows: int = 64) -> dict[str, torch.Tensor]:
    """Return the tensors of a small model."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(rows, 1024, generator=generator).to(torch.bfloat16)
    return {"w": weights, "b": torch.zeros(3) + seed}


def step(tensors: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Change a little of them, and return them."""
    tensors["w"][number % len(tensors["w"]), :20] += 1
    return tensors


def until(true: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Return when something has come true; it is looked at now and then."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not happen: {what}"
        time.sleep(0.05)


class FollowingServer:
    """One server. It is killed at the end of `running`, as by a crash.

    Args:
        folder: Of its state, sockets and log; a short path.
        flags: More flags, such as `--follow`.
        variables: More environment variables.
        seed: Of the checkpoint that its engine starts on.

    Attributes:
        command: What its flags are appended to.
    """

    command: tuple[str | Path, ...] = (_COMMAND,)

    def __init__(
        self,
        folder: Path,
        *flags: str,
        variables: Mapping[str, str] | None = None,
        seed: int = 1,
    ) -> None:
        self.folder = folder
        self.flags = flags
        self.variables = dict(variables or {})
        folder.mkdir(parents=True, exist_ok=True)
        self._model = folder / "model.safetensors"
        if not self._model.exists():
            save_file(checkpoint(seed), self._model)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"unix:{self.folder}/server.sock"

    @property
    def store(self) -> Path:
        """The folder of its versions."""
        return self.folder / "state" / "store"

    @property
    def log(self) -> str:
        """What it has printed in all its lives."""
        return (self.folder / "server.log").read_text()

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start it, and wait for nothing."""
        flags = [
            *("--engine", "memory", "--model", str(self._model), "--fetchers", "2"),
            *("--run-dir", f"{self.folder}/run", "--state-dir", f"{self.folder}/state"),
            *self._unless("--listen", self.address),
            *self._unless("--memory-bytes", "64000000"),
            *self._unless("--metrics", ""),
            "--no-same-host",
            *("--follow-interval-s", "0.1"),
        ]
        environment = os.environ | self.variables
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *flags, *self.flags], env=environment, stdout=log, stderr=log
            )
        return self.process

    def _unless(self, flag: str, value: str) -> tuple[str, ...]:
        """Return a flag that it has unless it was given another."""
        return () if flag in self.flags else (flag, value)

    def metric(self, name: str) -> float:
        """Return a metric of its last life, which was started with `--metrics 127.0.0.1:0`."""
        return scraped(self.log, name)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[Client]:
        """Run it until the block ends; its engine serves when the block begins."""
        process = self.spawn()
        try:
            with Client(self.address) as client:
                try:
                    wait_serving(process, client, _START_S)
                except AssertionError as error:
                    raise AssertionError(self.log[-2000:]) from error
                yield client
        finally:
            self.kill()


def staged(client: Client, version: Version) -> bool:
    """Tell whether a server has a version in memory, and it is the same as another server's."""
    found = {one.version: one for one in client.versions()}.get(version.version)
    return (
        found is not None
        and (found.durability, found.residency) == (Durability.COMMITTED, Residency.STAGED)
        and (found.content_digest, found.manifest_digest, found.metadata, found.epoch)
        == (version.content_digest, version.manifest_digest, version.metadata, version.epoch)
    )
