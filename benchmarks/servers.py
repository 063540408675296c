"""Starts weightsync-server and other programs for a benchmark and stops them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from weightsync_client import Client, ClientError

__all__ = [
    "SAMPLE_S",
    "descendants",
    "free_port",
    "peak_memory",
    "process",
    "rss_anon",
    "weightsync_server",
]

_START_S = 60.0
_STOP_S = 30.0
#: Between two looks at the memory of a process.
SAMPLE_S = 0.05


def free_port(run: int = 1) -> int:
    """Return the first of `run` TCP ports in a row that were free a moment ago.

    The kernel gives none of them to a connection meanwhile: they lie below those that it gives.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(1024, given - run)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + run):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@contextlib.contextmanager
def process(
    *arguments: str,
    log: Path,
    piped: bool = False,
    environment: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python program until the block ends.

    Args:
        *arguments: Of the interpreter.
        log: Where it writes.
        piped: Whether its standard input and output are pipes instead.
        environment: Variables of its own.
        wrapper: What its command line begins with, as where it runs in a network namespace.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*wrapper, sys.executable, *arguments],
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def weightsync_server(
    folder: Path,
    listen: list[str],
    *flags: str,
    engine: str = "",
    store: str = "memory://",
    environment: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    program: str = "weightsync_server.cli",
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a real weightsync-server until the block ends.

    Args:
        folder: For its sockets, state and log.
        listen: Addresses, of which the first is asked whether it answers.
        *flags: More flags.
        engine: Socket of the bridge, or `none`, as beside `--engines`, or `memory`; empty: a socket
            that does not exist, which pushes do not need.
        store: Where versions are kept; empty: in the state folder.
        environment: Variables of its own.
        wrapper: As for `process`.
        program: The module that is run.
    """
    own = engine in ("none", "memory")
    named = engine if own else f"unix:{engine or folder / 'absent.sock'}"
    arguments = [
        *("-m", program, "--name", "bench", "--store", store),
        *("--engine", named, "--metrics", ""),
        *("--run-dir", str(folder), "--state-dir", str(folder / "state")),
        *("--drain-timeout-s", "2"),
    ]
    for address in listen:
        arguments += ["--listen", address]
    log = folder / "server.log"
    running = process(*arguments, *flags, log=log, environment=environment, wrapper=wrapper)
    with running as child:
        deadline = time.monotonic() + _START_S
        while not _answers(listen[0].partition("?")[0]):
            if child.poll() is not None or time.monotonic() > deadline:
                msg = f"weightsync-server did not start:\n{log.read_text()[-3000:]}"
                raise RuntimeError(msg)
            time.sleep(0.1)
        yield child


def _answers(address: str) -> bool:
    with contextlib.suppress(ClientError), Client(address) as client:
        return bool(client.status().models)
    return False


def descendants(pid: int) -> list[int]:
    """Return a process and all processes below it."""
    found = [pid]
    for parent in found:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in tasks.read_text().split()]
    return found


def rss_anon(pids: list[int]) -> int:
    """Return the bytes of anonymous memory that processes hold together; not shared memory."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) << 10
    return total


@contextlib.contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Yield what becomes the most bytes of memory of their own of a process and its children."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], rss_anon(descendants(pid)))
            if stop.wait(SAMPLE_S):
                return

    thread = threading.Thread(target=watch, name="rss")
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
