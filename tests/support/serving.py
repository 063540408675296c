"""Servers that tests start as a user does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.processes import stop
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SERVER", "memory_flags", "serving_memory", "wait_serving"]

#: The program.
SERVER = Path(sys.executable).with_name("weightsync-server")
_START_S = 60.0


def memory_flags(folder: Path, model: Path) -> list[str]:
    """Return the flags of a server with the engine for tests, which listens in a folder."""
    return [
        *("--engine", "memory", "--model", str(model), "--ranks", "2", "--store", "memory://"),
        *("--listen", f"unix:{folder}/server.sock", "--run-dir", f"{folder}/run"),
        *("--state-dir", f"{folder}/state", "--metrics", ""),
    ]


@contextlib.contextmanager
def serving_memory(folder: Path, model: Path, log: Path | None = None) -> Iterator[Client]:
    """Run a server with the engine for tests until the body ends; it must end well then.

    Args:
        folder: For its socket and files; a short path.
        model: What it serves: a safetensors file, or a folder of them.
        log: A file for what it prints; None: where the test prints.
    """
    with contextlib.ExitStack() as files:
        stderr = files.enter_context(log.open("wb")) if log is not None else None
        server = subprocess.Popen([SERVER, *memory_flags(folder, model)], stderr=stderr)
    try:
        with Client(f"unix:{folder}/server.sock") as client:
            wait_serving(server, client, _START_S)
            yield client
    finally:
        assert stop(server) == 0


def wait_serving(server: subprocess.Popen[Any], client: Client, seconds: float) -> None:
    """Return when the engine beside a server serves, which is still alive then."""
    end = time.monotonic() + seconds
    while not _serving(client):
        assert server.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)


def _serving(client: Client) -> bool:
    try:
        return client.health("serving")
    except ClientError:
        return False
