"""How soon control calls are answered while pushes run at full speed, or stall in every slot.

{phase}_p50_ms   median of GetStatus, ListVersions, GetPush and a health check, in turn
{phase}_p99_ms   99 of 100 are answered within this
{phase}_max_ms   the slowest

Phases: idle; one_push and four_pushes, each from a process of its own with the public client over
a unix socket, one push after the other; stalled, in which every slot belongs to a push whose stream
says nothing. pushed_gbps_{phase} is what the pushes moved meanwhile, in 10^9 bytes per second.

The times are those of a caller on the same machine, whose own turns on a busy processor count too:
with --nice the pushing clients step back for the server and the caller. The store is memory://, and
no engine is attached.

With --vllm one is: a real vLLM (CPU) with a tiny model generates all the while, and every figure
has the suffix _generating. tokens_per_s_{phase}_generating is what it generated meanwhile.
"""

from __future__ import annotations

import argparse
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
from benchmarks.checkpoints import make_checkpoint
from benchmarks.generating import token_count
from benchmarks.servers import process, weightsync_server
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_client import Client, ClientError

__all__ = ["main", "summary"]

_MODEL = "bench"
_PUSHES = 4
#: Seconds between two calls.
_PACE_S = 0.005
_TENSORS = 64
#: That vLLM runs at once.
_REQUESTS = 2
#: Until vLLM has started and its checkpoint is adopted.
_ENGINE_S = 240.0


def main() -> None:
    """Read the command line, measure and print; or push, when called by itself."""
    parser = report.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=15, help="per phase (default 15)")
    parser.add_argument("--mib", type=int, default=256, help="bytes per push (default 256 MiB)")
    parser.add_argument("--nice", type=int, default=0, help="of the pushing processes (default 0)")
    parser.add_argument("--vllm", action="store_true", help="beside a vLLM that generates")
    parser.add_argument("--push-to", default="", help="push to this address until terminated")
    options = parser.parse_args()
    if options.push_to:
        _push_for_ever(options.push_to, options.mib << 20)
        return
    # The version that vLLM serves takes a slot that no push gets.
    slots = _PUSHES + options.vllm
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        folder = Path(name)
        address = f"unix:{folder}/control.sock"
        flags = ("--slots", str(slots), "--max-pushes", str(_PUSHES))
        engine = str(folder / "engine.sock")
        with (
            weightsync_server(folder, [address], *flags, engine=engine),
            _generating(folder) if options.vllm else contextlib.nullcontext() as tokens,
        ):
            facts = _measure(folder, address, options, tokens)
    parameters = {
        "seconds_per_phase": options.seconds,
        "bytes_per_push": options.mib << 20,
        "slots": slots,
        "pace_ms": _PACE_S * 1e3,
        "nice": options.nice,
        "engine": f"vllm (CPU), {_REQUESTS} requests generating" if options.vllm else "none",
    }
    report.emit("control", parameters, {}, facts, as_json=options.json)


def _measure(
    folder: Path, address: str, options: argparse.Namespace, tokens: Callable[[], int] | None
) -> dict[str, float]:
    facts: dict[str, float] = {}
    seconds = options.seconds
    with grpc.insecure_channel(address) as channel:
        caller = _Caller(channel, tokens)
        facts |= caller.phase("idle", seconds)
        for name, count in (("one_push", 1), ("four_pushes", 4)):
            with _pushers(folder, address, count, options.mib, options.nice) as pushed:
                before, started = pushed(), time.monotonic()
                facts |= caller.phase(name, seconds)
                speed = (pushed() - before) / (time.monotonic() - started) / 1e9
                facts[f"pushed_gbps_{name}{caller.suffix}"] = round(speed, 2)
        with _stalled(channel):
            facts |= caller.phase("stalled", seconds)
    return facts


@contextlib.contextmanager
def _generating(folder: Path) -> Iterator[Callable[[], int]]:
    """Run a vLLM that generates; yield what tells its tokens so far."""
    checkpoint, log = folder / "base", folder / "vllm.log"
    make_checkpoint(checkpoint, tied=True, small=True)
    arguments = ("-m", "benchmarks.generating", str(folder), str(checkpoint), str(_REQUESTS))
    newest, first = [0], threading.Event()

    def read(lines: Any) -> None:
        with contextlib.suppress(ValueError):
            for line in lines:
                count = token_count(line)
                if count is not None:
                    newest[0] = count
                    first.set()

    with process(*arguments, log=log, piped=True) as child:
        threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
        deadline = time.monotonic() + _ENGINE_S
        while not first.wait(1):
            if child.poll() is not None or time.monotonic() > deadline:
                msg = f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}"
                raise RuntimeError(msg)
        yield lambda: newest[0]


class _Caller:
    """Makes control calls one after the other and times them.

    Args:
        channel: To the server.
        tokens: Tells how many tokens a vLLM beside it has generated; None: there is none.

    Attributes:
        suffix: Of the names of its figures.
    """

    def __init__(self, channel: grpc.Channel, tokens: Callable[[], int] | None = None) -> None:
        self.suffix = "" if tokens is None else "_generating"
        self._tokens = tokens
        self._stub = weightsync_pb2_grpc.WeightSyncStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def phase(self, name: str, seconds: float) -> dict[str, float]:
        """Return the figures of one phase."""
        calls = self._calls()
        times: list[float] = []
        before, begin = self._tokens() if self._tokens else 0, time.monotonic()
        end = begin + seconds
        while time.monotonic() < end:
            for call in calls:
                started = time.perf_counter()
                call()
                times.append((time.perf_counter() - started) * 1e3)
                time.sleep(_PACE_S)
        figures = {f"{name}_{key}_ms{self.suffix}": ms for key, ms in summary(times).items()}
        if self._tokens is not None:
            speed = (self._tokens() - before) / (time.monotonic() - begin)
            figures[f"tokens_per_s_{name}{self.suffix}"] = round(speed, 1)
        return figures

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


def summary(times: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum, to a hundredth."""
    ordered = sorted(times)
    figures = {
        "p50": statistics.median(ordered),
        "p99": ordered[int(len(ordered) * 0.99)],
        "max": ordered[-1],
    }
    return {key: round(value, 2) for key, value in figures.items()}


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
                client.push(
                    tensors,
                    shard_bytes=size // 16,
                    on_progress=note,
                    delta="never",
                    same_host="never",
                )
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
    calls = [stub.PushWeights.future(messages(first + index)) for index in range(_PUSHES)]
    while len(stub.GetStatus(pb.GetStatusRequest()).models[0].pushes) < _PUSHES:
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
