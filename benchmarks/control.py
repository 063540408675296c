"""How soon control calls are answered while pushes run at full speed, or stall in every slot.

{phase}_p50_ms   median of GetStatus, ListVersions, GetPush and a health check, in turn
{phase}_p99_ms   99 of 100 are answered within this
{phase}_max_ms   the slowest

Phases: idle; one_push and four_pushes, each from a process of its own with the public client over
a unix socket, one push after the other; stalled, in which every slot belongs to a push whose stream
says nothing. pushed_gbps_{phase} is what the pushes moved meanwhile, in 10^9 bytes per second.

The times are those of a caller on the same machine, whose own turns on a busy processor count too:
with --nice the pushing clients step back for the server and the caller. No engine is attached and
the store is memory://.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import report
from benchmarks.servers import process, weightsync_server
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_client import Client, ClientError

__all__ = ["main"]

_MODEL = "bench"
_SLOTS = 4
#: Seconds between two calls.
_PACE_S = 0.005
_TENSORS = 64


def main() -> None:
    """Read the command line, measure and print; or push, when called by itself."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="per phase (default 15)")
    parser.add_argument("--mib", type=int, default=256, help="bytes per push (default 256 MiB)")
    parser.add_argument("--nice", type=int, default=0, help="of the pushing processes (default 0)")
    parser.add_argument("--push-to", default="", help="push to this address until terminated")
    options = parser.parse_args()
    if options.push_to:
        _push_for_ever(options.push_to, options.mib << 20)
        return
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as folder:
        address = f"unix:{folder}/control.sock"
        flags = ("--slots", str(_SLOTS), "--max-pushes", str(_SLOTS))
        with weightsync_server(Path(folder), [address], *flags):
            facts = _measure(Path(folder), address, options.seconds, options.mib, options.nice)
    parameters = {
        "seconds_per_phase": options.seconds,
        "bytes_per_push": options.mib << 20,
        "slots": _SLOTS,
        "pace_ms": _PACE_S * 1e3,
        "nice": options.nice,
        "engine": "none",
    }
    report.emit("control", parameters, {}, facts, as_json=options.json)


def _measure(folder: Path, address: str, seconds: float, mib: int, nice: int) -> dict[str, float]:
    facts: dict[str, float] = {}
    with grpc.insecure_channel(address) as channel:
        caller = _Caller(channel)
        facts |= caller.phase("idle", seconds)
        for name, count in (("one_push", 1), ("four_pushes", 4)):
            with _pushers(folder, address, count, mib, nice) as pushed:
                before, started = pushed(), time.monotonic()
                facts |= caller.phase(name, seconds)
                moved = pushed() - before
                facts[f"pushed_gbps_{name}"] = round(moved / (time.monotonic() - started) / 1e9, 2)
        with _stalled(channel):
            facts |= caller.phase("stalled", seconds)
    return facts


class _Caller:
    """Makes control calls one after the other and times them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = weightsync_pb2_grpc.WeightSyncStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def phase(self, name: str, seconds: float) -> dict[str, float]:
        """Return the figures of one phase."""
        calls = self._calls()
        times: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for call in calls:
                started = time.perf_counter()
                call()
                times.append((time.perf_counter() - started) * 1e3)
                time.sleep(_PACE_S)
        times.sort()
        figures = {
            "p50": statistics.median(times),
            "p99": times[int(len(times) * 0.99)],
            "max": times[-1],
        }
        return {f"{name}_{key}_ms": round(value, 2) for key, value in figures.items()}

    def _calls(self) -> list[Callable[[], object]]:
        stub = self._stub
        push = self._known_push()
        return [
            lambda: stub.GetStatus(pb.GetStatusRequest()),
            lambda: stub.ListVersions(pb.ListVersionsRequest(model=_MODEL)),
            lambda: stub.GetPush(pb.GetPushRequest(push_id=push)),
            lambda: self._health.Check(health_pb2.HealthCheckRequest(service="push")),
        ]

    def _known_push(self) -> str:
        # Any that the server remembers: an open one, or one that is opened and aborted for this.
        (model,) = self._stub.GetStatus(pb.GetStatusRequest()).models
        if model.pushes:
            return str(model.pushes[0].push_id)
        opened = self._stub.BeginPush(pb.BeginPushRequest(model=_MODEL))
        self._stub.AbortPush(pb.AbortPushRequest(push_id=opened.push_id))
        return opened.push_id


@contextlib.contextmanager
def _pushers(
    folder: Path, address: str, count: int, mib: int, nice: int
) -> Iterator[Callable[[], int]]:
    """Run processes that push all the while; yield what tells the bytes of ended ones."""
    log = folder / "pushers.log"
    arguments = ("-m", "benchmarks.control", "--push-to", address, "--mib", str(mib))
    if nice:
        code = f"import os, runpy; os.nice({nice}); runpy.run_module('benchmarks.control', "
        arguments = ("-c", code + "run_name='__main__')", *arguments[2:])
    done = [0]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            child = stack.enter_context(process(*arguments, log=log, piped=True))
            assert child.stdout is not None
            # The first push warms slots and connections.
            assert child.stdout.readline(), log.read_text()
            threading.Thread(target=_count, args=(child.stdout, done), daemon=True).start()
        yield lambda: done[0]


def _count(lines: Any, done: list[int]) -> None:
    with contextlib.suppress(ValueError):
        for line in lines:
            done[0] += int(line)


def _push_for_ever(address: str, size: int) -> None:
    part = np.arange(size // 2 // _TENSORS, dtype=np.uint16)
    tensors = {f"tensor{index:02}": part + np.uint16(index) for index in range(_TENSORS)}
    with Client(address) as client:
        while True:
            tensors["tensor00"] += np.uint16(1)
            sent = [0]

            def note(total: int, _: int, sent: list[int] = sent) -> None:
                sent[0] = total

            # Of several pushes a lower version cannot follow a higher one; its bytes came all the
            # same.
            try:
                client.push(tensors, shard_bytes=size // 16, on_progress=note, delta="never")
            except ClientError as error:
                time.sleep(error.retry_after_s or 0)
            sys.stdout.write(f"{sent[0]}\n")
            sys.stdout.flush()


@contextlib.contextmanager
def _stalled(channel: grpc.Channel) -> Iterator[None]:
    """Hold a stream in every slot that has begun a push and says no more."""
    stub = weightsync_pb2_grpc.WeightSyncStub(channel)
    over = threading.Event()
    (model,) = stub.GetStatus(pb.GetStatusRequest()).models

    def messages(version: int) -> Iterator[pb.PushWeightsRequest]:
        begin = pb.BeginPushRequest(model=_MODEL, version=version)
        yield pb.PushWeightsRequest(begin=begin)
        while not over.wait(1):
            yield pb.PushWeightsRequest(heartbeat=pb.Heartbeat())

    first = model.newest_version + 1000
    calls = [stub.PushWeights.future(messages(first + index)) for index in range(_SLOTS)]
    while len(stub.GetStatus(pb.GetStatusRequest()).models[0].pushes) < _SLOTS:
        time.sleep(0.05)
    try:
        yield
    finally:
        over.set()
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                call.result()


if __name__ == "__main__":
    main()
