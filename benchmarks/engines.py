"""What several engines beside one server cost: shared memory, the pause, and the decision.

memory_over_one    shared memory with the most engines over that with one, after applies: every
                   memfd that the server, its fetchers or an engine has open or maps, each once
reserved_over_one  the same of what the server reserves (GetStatus)
apply_over_one     paused_total of an apply together, from the first request to pause until the last
                   engine runs, median over rounds, with the most engines over one; every value is
                   changed; prepare, which comes before the pause, is left out
small_over_one     the same with one tensor in 64 changed: what of the pause is not digesting
decision_s         the record of the decision, the one fsync within that pause: the same record,
                   appended to a journal on the same file system, median over 50, measured apart

pause_s_N, small_pause_s_N, prepare_s_N, shared_mib_N and reserved_mib_N are the figures with N
engines. Engines are those of `weightsync.testing`, each a process of its own behind the bridge's
protocol, which copy and digest but generate nothing: a pause waits for no step. They share the
cores of this machine, and what more engines than cores write takes its time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.servers import descendants, process, weightsync_server
from weightsync.engine.v1 import engine_pb2_grpc
from weightsync.testing import MemoryEngine
from weightsync.vllm.bridge.engine_servicer import EngineServicer
from weightsync_client import Client, EngineState
from weightsync_server.engine.journal import HOST, Entry, JournalFile

__all__ = ["main", "shared_memory"]

_TENSORS = 64
_START_S = 120.0
_DECISIONS = 50
_Tensors = dict[str, npt.NDArray[np.float32]]


def main() -> None:
    """Read the command line, measure and print; or be an engine, when called by itself."""
    parser = report.arguments(__doc__)
    parser.add_argument("--engines", default="1,2,4,8", help="how many (default 1,2,4,8)")
    parser.add_argument("--mib", type=int, default=256, help="of the model (default 256)")
    parser.add_argument("--rounds", type=int, default=7, help="applies of each kind (default 7)")
    parser.add_argument("--serve", nargs=2, metavar=("SOCKET", "RUN_DIR"), help="be an engine")
    options = parser.parse_args()
    if options.serve:
        socket, run_dir = map(Path, options.serve)
        asyncio.run(_serve(socket, run_dir, options.mib))
        return
    counts = sorted(int(count) for count in options.engines.split(","))
    samples: dict[str, list[float]] = {}
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
            samples |= _measure(Path(name), count, options)
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        samples["decision_s"] = _decisions(Path(name) / "journal", counts[-1])
    ratios = {
        "memory_over_one": "shared_mib",
        "reserved_over_one": "reserved_mib",
        "apply_over_one": "pause_s",
        "small_over_one": "small_pause_s",
    }
    facts = {
        name: round(_over(samples, figure, counts[-1], counts[0]), 3)
        for name, figure in ratios.items()
    }
    parameters = {"engines": counts, "mib": options.mib, "rounds": options.rounds}
    report.emit("engines", parameters, samples, facts, as_json=options.json)


def _over(samples: dict[str, list[float]], figure: str, most: int, least: int) -> float:
    return statistics.median(samples[f"{figure}_{most}"]) / statistics.median(
        samples[f"{figure}_{least}"]
    )


def _measure(folder: Path, count: int, options: argparse.Namespace) -> dict[str, list[float]]:
    address, engines = f"unix:{folder}/push.sock", folder / "engines"
    engines.mkdir()
    flags = ("--engines", str(engines), "--slots", "2")
    names = ("pause_s", "small_pause_s", "prepare_s", "shared_mib", "reserved_mib")
    found: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(weightsync_server(folder, [address], *flags, engine="none"))
        pids = stack.enter_context(_engines(folder, engines, count, options.mib))
        client = stack.enter_context(Client(address))
        _all_serve(client, count)
        tensors = _tensors(options.mib)
        for number in range(options.rounds):
            for array in tensors.values():
                np.add(array, 1, out=array)
            phases = _applied(client, tensors, count)
            found["pause_s"].append(phases.paused_total_s)
            found["prepare_s"].append(phases.prepare_s)
            found["shared_mib"].append(shared_memory([*descendants(server.pid), *pids]) / 2**20)
            found["reserved_mib"].append(client.status().memory_reserved_bytes / 2**20)
            tensors[f"t{number % _TENSORS:02}"] += 1
            found["small_pause_s"].append(_applied(client, tensors, count).paused_total_s)
    return {f"{name}_{count}": values for name, values in found.items()}


def _applied(client: Client, tensors: _Tensors, count: int) -> Any:
    """Return the phases of the slowest engine; all take part, and what they serve is proved."""
    done = client.apply(client.push(tensors, delta="never").version)
    taken = [one for one in done.engines if one.report is not None]
    if len(taken) != count:
        msg = f"{len(taken)} of {count} engines took the version"
        raise RuntimeError(msg)
    return done.phases


def _all_serve(client: Client, count: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        (model,) = client.status().models
        if [one.state for one in model.engines] == [EngineState.SERVING] * count:
            return
        if time.monotonic() > deadline:
            msg = f"the engines do not serve: {model.engines}"
            raise RuntimeError(msg)
        time.sleep(0.1)


def _tensors(mib: int) -> _Tensors:
    size = (mib << 20) // 4 // _TENSORS
    return {f"t{index:02}": np.full(size, index, np.float32) for index in range(_TENSORS)}


@contextlib.contextmanager
def _engines(folder: Path, sockets: Path, count: int, mib: int) -> Iterator[list[int]]:
    """Run engines until the block ends; yield their processes."""
    with contextlib.ExitStack() as stack:
        children = []
        for index in range(count):
            serve = ("--serve", str(sockets / f"e{index}.sock"), str(folder), "--mib", str(mib))
            arguments = ("-m", "benchmarks.engines", *serve)
            log = folder / f"e{index}.log"
            children.append(stack.enter_context(process(*arguments, log=log)))
        yield [child.pid for child in children]


async def _serve(socket: Path, run_dir: Path, mib: int) -> None:
    segments = run_dir / "segments.sock"
    tensors = {name: ("F32", array.shape, array.tobytes()) for name, array in _tensors(mib).items()}
    engine = MemoryEngine(tensors, segments)
    server = grpc.aio.server()
    servicer = EngineServicer(cast("Any", engine), str(segments))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    await server.wait_for_termination()


def shared_memory(pids: list[int]) -> int:
    """Return the bytes of all memfds that processes have open or map, each counted once."""
    found: dict[int, int] = {}
    for pid in pids:
        # It may close one meanwhile, or end.
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names are what is wanted
                path = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(OSError):
                    if os.readlink(path).startswith("/memfd:"):  # noqa: PTH115 - not a real path
                        status = os.stat(path)  # noqa: PTH116 - as above
                        found[status.st_ino] = status.st_blocks * 512
            mapped: dict[int, int] = {}
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                place, _, _, _, inode, *name = line.split(maxsplit=5)
                if name and name[0].startswith("/memfd:"):
                    begin, end = (int(part, 16) for part in place.split("-"))
                    mapped[int(inode)] = mapped.get(int(inode), 0) + end - begin
            for number_of, size in mapped.items():
                found.setdefault(number_of, size)
    return sum(found.values())


def _decisions(path: Path, count: int) -> list[float]:
    """Return how long the record of a decision took to be on disk, each time."""
    bases = {f"e{index}": 1 for index in range(count)}
    file = JournalFile(path)
    times = []
    for number in range(_DECISIONS):
        file.write(Entry("INTENT", f"{number:016x}", 2, 1, engine=HOST, bases=bases))
        started = time.perf_counter()
        file.write(Entry("COMMIT", f"{number:016x}", 2, 1, engine=HOST))
        times.append(time.perf_counter() - started)
    file.close()
    return times


if __name__ == "__main__":
    main()
