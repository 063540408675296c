"""How many pulling clients one server serves, and how long the last of them waits.

served_gbps_<n>     bytes of all pulls over the seconds from the first call to the last byte
pull_s_<n>          median seconds of one client's pull, the digest of every tensor compared
worst_pull_s_<n>    seconds of the slowest of them

n clients, from 1 to 64, begin to pull the same version at once, each over a connection of its own.
They run as threads of at most as many processes as there are cores, which they share with the
server; on a machine with few cores, the clients are what it has to do most. GB are 10^9 bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import report
from benchmarks.servers import free_port, weightsync_server
from weightsync_client import Client

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["main", "shares"]

_TENSORS = 100
_SHARD_BYTES = 16 << 20
#: Time from the word to all until the first call, so that all have heard it.
_AHEAD_S = 0.2

#: When a pull began and when it ended, by the machine's monotonic clock.
_Span = tuple[float, float]


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--mib", type=int, default=128, help="bytes per pull (default 128 MiB)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    options = parser.parse_args()
    size = options.mib << 20
    most = max(options.clients)
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        address = f"127.0.0.1:{free_port()}"
        with weightsync_server(Path(name), [address], "--max-pulls", str(most)):
            version = _push(address, size)
            with _pullers(address, version) as links:
                for number in range(1 + options.rounds):
                    for count in options.clients:
                        spans = _together(links, count)
                        if number:
                            _add(samples, count, size, spans)
    parameters = {"bytes": size, "rounds": options.rounds, "processes": len(links)}
    report.emit("pullers", parameters, samples, as_json=options.json)


def shares(count: int, processes: int) -> list[int]:
    """Return how many clients each process runs."""
    return [count // processes + (index < count % processes) for index in range(processes)]


def _push(address: str, size: int) -> int:
    values = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    tensors = dict(enumerate(np.array_split(values.view(np.uint16), _TENSORS)))
    named = {f"layers.{index}.weight": tensor for index, tensor in tensors.items()}
    with Client(address) as client:
        return client.push(named, shard_bytes=_SHARD_BYTES, delta="never").version


def _add(samples: dict[str, list[float]], count: int, size: int, spans: list[_Span]) -> None:
    taken = [end - begin for begin, end in spans]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    for name, value in {
        "served_gbps": count * size / whole / 1e9,
        "pull_s": statistics.median(taken),
        "worst_pull_s": max(taken),
    }.items():
        samples.setdefault(f"{name}_{count}", []).append(value)


@contextmanager
def _pullers(address: str, version: int) -> Iterator[list[Connection]]:
    """Run the processes of the clients until the block ends."""
    context = multiprocessing.get_context("spawn")
    links, children = [], []
    for _ in range(len(os.sched_getaffinity(0))):
        ours, theirs = context.Pipe()
        child = context.Process(target=_serve, args=(theirs, address, version), daemon=True)
        child.start()
        theirs.close()
        links.append(ours)
        children.append(child)
    try:
        yield links
    finally:
        for link in links:
            link.close()
        for child in children:
            child.join()


def _together(links: list[Connection], count: int) -> list[_Span]:
    """Have so many clients pull at once and return when each began and ended."""
    for link, share in zip(links, shares(count, len(links)), strict=True):
        link.send(share)
    for link in links:
        assert link.recv() == "ready"
    start = time.monotonic() + _AHEAD_S
    for link in links:
        link.send(start)
    spans: list[_Span] = [span for link in links for span in link.recv()]
    assert len(spans) == count, f"{count - len(spans)} pulls failed"
    return spans


def _serve(link: Connection, address: str, version: int) -> None:
    """Be one process of clients, until the other end is closed."""
    while True:
        try:
            share = link.recv()
        except EOFError:
            return
        clients = [Client(address) for _ in range(share)]
        for client in clients:
            client.status()
        link.send("ready")
        start: float = link.recv()
        spans: list[_Span] = []
        threads = [
            threading.Thread(target=_pull, args=(client, version, start, spans))
            for client in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()
        link.send(spans)


def _pull(client: Client, version: int, start: float, spans: list[_Span]) -> None:
    time.sleep(max(0.0, start - time.monotonic()))
    begun = time.monotonic()
    count = sum(1 for _ in client.tensors(version))
    if count == _TENSORS:
        spans.append((begun, time.monotonic()))


if __name__ == "__main__":
    main()
