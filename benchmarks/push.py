"""How fast a push is, against what gRPC itself can do on this machine.

memcpy_gbps             one thread copies one warm block of all bytes
grpc_floor_gbps         a bare grpcio client stream of flat messages with the same chunks into a
                        warm buffer, over TCP, allocator and channels set as in our server
stream_gbps             the public client against a real weightsync-server: the whole push call,
                        which begins before the first byte and ends when every tensor is verified
                        and the version is staged; the trainer's digests are computed in that time
stream_over_grpc_floor  median of the ratios within each round; wanted at least 1.0
stock_gbps              a client that is generated from the proto, one call for everything,
                        digests included, in a process of its own whose C library keeps freed
                        buffers (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_)
stock_over_grpc_floor   as above; wanted at least 0.9

same_host_gbps          the public client's call where it writes into the server's memory, on at
                        most two threads, in shards of the client's own choice; wanted beside
                        tensor_copy_gbps, one thread that copies the same tensors one by one into
                        warm memory
same_host_over_memcpy   median of the ratios within each round; wanted at least 0.75
same_host_limit_gbps    two threads copy the tensors into such memory, digest them on the way and
                        then digest what lies there: what a push moves, without the push
same_host_over_limit    median of the ratios within each round

durable_gbps            the public client's call, as it chooses its way, against a server with the
                        default store on the disk of --disk: it ends when the version would survive
                        a crash
disk_gbps               one thread writes the same shards to files and flushes each
durable_over_disk       median of the ratios within each round; wanted at least 0.8

The streams with suffix _unix over a unix socket. GB are 10^9 bytes. The three take turns, who goes
first changes from round to round, every byte changes before each of them, slots are warm, the
store is memory:// but for the durable ones, and no engine is attached. --durable measures these
alone.

With --ingest N and --clients M instead: how fast M client processes push one version together, each
its own shards on one stream,

ingest_gbps       to N ingest processes, from the begin to the answer of the commit
own_gbps          to the server's own process
ingest_over_own   the one median over the other

With --memory instead: how much the anonymous memory (RssAnon) of server and fetchers together
grows at most over its idle value, while 8 GiB are pushed as 8 versions, and as one. Where
either grows by more than 300 MB it ends with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.crowd import crowd_samples
from benchmarks.durable import filesystem, write_shards
from benchmarks.floor import CLIENT_OPTIONS, make_chunk_class, push_floor
from benchmarks.handing import limit_of, plain_copy
from benchmarks.servers import (
    SAMPLE_S,
    descendants,
    free_port,
    peak_memory,
    process,
    rss_anon,
    weightsync_server,
)
from benchmarks.source import Source
from benchmarks.stock import StockClient, stock_client
from weightsync_client import Client, Durability, PushOptions, Residency, TransferPath

__all__ = ["floor_client", "main"]

_CHUNK_BYTES = 1 << 20
#: Of a push on the server's host.
_THREADS = 2
#: Rounds that warm connections, slots and the floor's buffer and are not counted.
_WARM_UP = 3
#: Most that RssAnon of server and fetchers may grow while 8 GiB are pushed, MB.
_MEMORY_MB = 300
#: Versions that the store on disk keeps: those before are removed while the next are pushed.
_KEPT = 2


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="bytes per push (default 1024 MiB)")
    parser.add_argument("--shards", type=int, default=16, help="shards per push (default 16)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default 9)")
    parser.add_argument("--ingest", type=int, default=0, help="ingest processes (default 0)")
    parser.add_argument("--clients", type=int, default=1, help="client processes (default 1)")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of speed")
    parser.add_argument("--durable", action="store_true", help="durable_gbps and its floor alone")
    parser.add_argument(
        "--disk", type=Path, default=Path("build/bench"), help="of the durable ones (build/bench)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as folder:
        if options.memory:
            sys.exit(_report_memory(Path(folder), as_json=options.json))
        if options.ingest:
            _report_ingest(Path(folder), options)
            return
        source = Source(options.mib << 20, options.shards)
        options.disk.mkdir(parents=True, exist_ok=True)
        parameters = {
            "bytes": options.mib << 20,
            "shards": options.shards,
            "tensors": len(source.tensors),
            "chunk_bytes": _CHUNK_BYTES,
            "rounds": options.rounds,
            "streams": 1,
            "store": "memory://",
            "warm_slots": True,
            "disk": filesystem(options.disk),
        }
        samples: dict[str, list[float]] = {}
        if not options.durable:
            samples |= _measure(Path(folder), source, options.shards, options.rounds)
        samples |= _durable(Path(folder), source, options.rounds, options.disk)
        report.emit("push", parameters, samples, as_json=options.json)


def _report_ingest(folder: Path, options: argparse.Namespace) -> None:
    nbytes, clients = options.mib << 20, options.clients
    samples = {
        f"{name}_gbps": crowd_samples(folder / name, clients, ingest, nbytes, options.rounds)
        for name, ingest in (("own", 0), ("ingest", options.ingest))
    }
    ratio = report.median(samples["ingest_gbps"]) / report.median(samples["own_gbps"])
    parameters = {
        "bytes": nbytes,
        "clients": clients,
        "ingest": options.ingest,
        "rounds": options.rounds,
        "store": "memory://",
    }
    facts = {"ingest_over_own": round(ratio, 3)}
    report.emit("push_ingest", parameters, samples, facts, as_json=options.json)


def _measure(folder: Path, source: Source, shards: int, rounds: int) -> dict[str, list[float]]:
    samples = {"memcpy_gbps": _memcpy(source.view, rounds)}
    ports = {"": f"127.0.0.1:{free_port()}", "_unix": f"unix:{folder}/push.sock"}
    floors = {"": "127.0.0.1:0", "_unix": f"unix:{folder}/floor.sock"}
    with weightsync_server(folder, list(ports.values())):
        for suffix, address in ports.items():
            with (
                floor_client(folder, floors[suffix], source.view, shards) as floor,
                stock_client(folder, address, source.spec) as trainer,
                Client(address) as client,
            ):
                ways: dict[str, Callable[[], float]] = {
                    "grpc_floor": floor,
                    "stream": partial(_ours, client, source),
                    "stock": partial(_stock, trainer, client, len(source.view)),
                }
                speeds = _alternate(ways, source, rounds)
            for name in ways:
                samples[f"{name}_gbps{suffix}"] = [speed[name] for speed in speeds]
            for name in ("stream", "stock"):
                ratios = [speed[name] / speed["grpc_floor"] for speed in speeds]
                samples[f"{name}_over_grpc_floor{suffix}"] = ratios
        samples |= _same_host(ports["_unix"], source, rounds)
    return samples


def _same_host(address: str, source: Source, rounds: int) -> dict[str, list[float]]:
    cores = sorted(os.sched_getaffinity(0))
    # The hand-off takes a thread for each core that it may use.
    os.sched_setaffinity(0, cores[:_THREADS])
    try:
        with Client(address) as client, limit_of(source, _THREADS) as move:
            ways: dict[str, Callable[[], float]] = {
                "tensor_copy": partial(_speed, len(source.view), plain_copy(source)),
                "same_host": partial(_ours, client, source, TransferPath.SAME_HOST),
                "same_host_limit": partial(_speed, len(source.view), move),
            }
            speeds = _alternate(ways, source, rounds)
    finally:
        os.sched_setaffinity(0, cores)
    samples = {f"{name}_gbps": [speed[name] for speed in speeds] for name in ways}
    for name, against in (("memcpy", "tensor_copy"), ("limit", "same_host_limit")):
        ratios = [speed["same_host"] / speed[against] for speed in speeds]
        samples[f"same_host_over_{name}"] = ratios
    return samples


def _durable(folder: Path, source: Source, rounds: int, disk: Path) -> dict[str, list[float]]:
    address = f"unix:{folder}/durable.sock"
    # Where sockets are, paths are short; versions lie on the disk.
    own = folder / "durable"
    own.mkdir()
    flags = ("--retain-versions", str(_KEPT))
    with (
        tempfile.TemporaryDirectory(prefix="store-", dir=disk) as store,
        tempfile.TemporaryDirectory(prefix="plain-", dir=disk) as plain,
        weightsync_server(own, [address], *flags, store=f"file://{Path(store).resolve()}"),
        Client(address) as client,
    ):
        ways: dict[str, Callable[[], float]] = {
            "disk": partial(_on_disk, source, Path(plain), itertools.count()),
            "durable": partial(_durably, client, source),
        }
        speeds = _alternate(ways, source, rounds)
    samples = {f"{name}_gbps": [speed[name] for speed in speeds] for name in ways}
    samples["durable_over_disk"] = [speed["durable"] / speed["disk"] for speed in speeds]
    return samples


def _on_disk(source: Source, folder: Path, numbers: Iterator[int]) -> float:
    number = next(numbers)
    # As many copies lie on the disk as of the server: on some, blocks that were written before
    # are several times as fast as others.
    shutil.rmtree(folder / str(number - _KEPT - 1), ignore_errors=True)
    target = folder / str(number)
    target.mkdir()
    return _speed(len(source.view), lambda: write_shards(source, target))


def _durably(client: Client, source: Source) -> float:
    started = time.perf_counter()
    pushed = client.push(source.tensors, delta="never", shard_bytes=source.shard_bytes)
    speed = len(source.view) / (time.perf_counter() - started) / 1e9
    version = client.get_version(pushed.version)
    assert version.durability == Durability.COMMITTED, version
    return speed


def _memcpy(source: memoryview, rounds: int) -> list[float]:
    block = np.frombuffer(source, dtype=np.uint8)
    target = np.ones_like(block)
    np.copyto(target, block)
    return [_speed(len(block), lambda: np.copyto(target, block)) for _ in range(rounds)]


def _speed(size: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return size / (time.perf_counter() - started) / 1e9


@contextlib.contextmanager
def floor_client(
    folder: Path, address: str, view: memoryview, shards: int
) -> Iterator[Callable[[], float]]:
    """Yield a function that sends everything once and returns GB/s."""
    chunk_class = make_chunk_class()
    arguments = ("-m", "benchmarks.floor", address, str(len(view)))
    with process(*arguments, log=folder / "floor.log", piped=True) as server:
        target = _floor_target(server, address)
        with grpc.insecure_channel(target, CLIENT_OPTIONS) as channel:

            def send() -> None:
                received = push_floor(channel, view, shards, _CHUNK_BYTES, chunk_class)
                assert received == len(view), f"the floor's server got {received} bytes"

            yield lambda: _speed(len(view), send)


def _floor_target(server: subprocess.Popen[bytes], address: str) -> str:
    assert server.stdout is not None
    port = server.stdout.readline().decode().strip()
    return address if address.startswith("unix:") else f"127.0.0.1:{port}"


def _ours(client: Client, source: Source, way: TransferPath = TransferPath.STREAM) -> float:
    """Push everything once, in the given way, and return GB/s."""
    options: PushOptions = {"delta": "never"}
    if way is TransferPath.STREAM:
        # As many messages as the bare stream sends.
        options |= {"same_host": "never", "shard_bytes": source.shard_bytes}
    started = time.perf_counter()
    pushed = client.push(source.tensors, **options)
    assert pushed.way is way, pushed
    _check_staged(client, pushed.version)
    assert pushed.sent_bytes >= len(source.view), pushed
    return len(source.view) / (time.perf_counter() - started) / 1e9


def _stock(trainer: StockClient, client: Client, size: int) -> float:
    """Push everything once with generated code and return GB/s."""
    trainer.change()
    started = time.perf_counter()
    _check_staged(client, trainer.push())
    return size / (time.perf_counter() - started) / 1e9


def _check_staged(client: Client, number: int) -> None:
    version = client.get_version(number)
    assert version.residency == Residency.STAGED, version
    assert version.trainer_verified, version


def _alternate(
    ways: dict[str, Callable[[], float]], source: Source, rounds: int
) -> list[dict[str, float]]:
    found = []
    gc.disable()
    for number in range(_WARM_UP + rounds):
        speeds: dict[str, float] = {}
        names = list(ways)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            source.change()
            speeds[name] = ways[name]()
        if number >= _WARM_UP:
            found.append(speeds)
    gc.enable()
    return found


def _report_memory(folder: Path, *, as_json: bool) -> int:
    total = 8 << 30
    growth = {}
    for versions in (8, 1):
        growth[versions] = _memory_growth(folder / str(versions), total, versions)
    facts = {f"rss_anon_growth_mb_{n}_versions": round(size / 1e6, 1) for n, size in growth.items()}
    bound = {"wanted_at_most_mb": _MEMORY_MB, "met": max(facts.values()) <= _MEMORY_MB}
    parameters = {"bytes": total, "chunk_bytes": _CHUNK_BYTES, "sampled_every_s": SAMPLE_S}
    report.emit("push_memory", parameters, {}, facts | bound, as_json=as_json)
    return int(not bound["met"])


def _memory_growth(folder: Path, total: int, versions: int) -> int:
    """Return by how many bytes RssAnon of server and fetchers rose at most over idle."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    source = Source(1 << 30, 16)
    with weightsync_server(folder, [address]) as server, Client(address) as client:
        idle = rss_anon(descendants(server.pid))
        with peak_memory(server.pid) as peak:
            for _ in range(versions):
                source.change()
                pushed = client.push(
                    _repeated(source, total // versions), shard_bytes=source.shard_bytes
                )
                assert pushed.size_bytes >= total // versions, pushed
        return peak[0] - idle


def _repeated(source: Source, size: int) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    # The same bytes under new names: a trainer of 8 GiB would need 8 GiB more on this machine.
    for copy in range(size >> 30):
        for name, tensor in source.tensors.items():
            yield f"copy{copy}.{name}", tensor


if __name__ == "__main__":
    main()
