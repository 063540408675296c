"""What it saves that all ranks of a trainer push what they hold, against gathering it first.

Four processes on the server's host hold a model in bfloat16 together. In turns, who goes first
changes from round to round, they push the same weights

push_s          each what it holds, `client.push(model, step=...)`: until the last rank has returned
gather_push_s   as without that: `get_model_state_dict` gathers all tensors on rank 0 with PyTorch's
                own options for it, full_state_dict and cpu_offload; then rank 0 pushes them alone,
                on the same host: until rank 0 has returned

over_gather               median of the ratios within each round; wanted at most 0.6
memcpy_s                  one thread copies one warm block of as many bytes
push_over_memcpy          median of the ratios within each round
rank0_extra_bytes         how much the anonymous memory (RssAnon) of rank 0 grows at most over its
                          value before the push, the first one of the process included; wanted
                          at most 64 MiB
rank0_extra_bytes_gather  as above, of the gather and its push
delta_bytes               what all ranks send together where 1 % of the values changed, spread at
                          random, against a version that all had pushed before
delta_over_unsharded      that over what one process sends that holds all of it; wanted at most 1.05
delta_push_s              until the last rank has returned; once
bitwise_equal             whether all ranks got one version of one digest, other than that of the
                         round before, and the gathered weights have the same

The figures without a prefix are those of FSDP2, where each rank holds a quarter. Prefix hsdp: two
replicas of two halves. Prefix fsdp_tp: tensor parallel by two under FSDP2 by two. All bytes change
before each round, slots are warm, the store is memory://, and no engine is attached.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

from benchmarks import report
from benchmarks.servers import rss_anon, weightsync_server
from weightsync_client import Client, PushKind, PushResult, TransferPath

__all__ = ["main"]

_RANKS = 4
_HIDDEN = 1024
#: Knuth's multiplier: its products spread over all 32 bits.
_HASH = -1640531527
_SAMPLE_S = 0.003
#: Above the numbers of all rounds.
_DELTA_STEP = 1_000_000
#: Rounds that make and warm the slots and are not counted in times.
_WARM_UP = 2
#: Most that RssAnon of rank 0 may grow, bytes.
_EXTRA_BYTES = 64 << 20
_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="bytes per push (default 1024 MiB)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default 3)")
    parser.add_argument("--blocks", type=int, default=100, help="of three tensors (default 100)")
    parser.add_argument(
        "--forms", nargs="+", choices=_FORMS, default=list(_FORMS), help="default: all"
    )
    options = parser.parse_args()
    size = _Size(options.mib, options.blocks)
    parameters = {
        "bytes": size.nbytes,
        "tensors": 3 * size.blocks,
        "ranks": _RANKS,
        "rounds": options.rounds,
        "store": "memory://",
        "warm_slots": True,
    }
    samples: dict[str, list[float]] = {}
    facts: dict[str, Any] = {"wanted_at_most_extra_bytes": _EXTRA_BYTES}
    for form in options.forms:
        prefix = "" if form == "fsdp2" else f"{form}_"
        found, told = _measure(form, size, options.rounds)
        samples |= {prefix + name: values for name, values in found.items()}
        facts |= {prefix + name: value for name, value in told.items()}
    report.emit("sharded", parameters, samples, facts, as_json=options.json)


def _measure(
    form: str, size: _Size, rounds: int
) -> tuple[dict[str, list[float]], dict[str, int | float | bool]]:
    """Return samples and facts of one form, from processes and a server of its own."""
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as folder:
        address = f"unix:{folder}/push.sock"
        with weightsync_server(Path(folder), [address]):
            arguments = (folder, address, form, size, rounds)
            # They begin as copies of a process that has imported all this, and done nothing else.
            multiprocessing.set_forkserver_preload(["benchmarks.sharded"])
            start_processes(  # type: ignore[no-untyped-call] # torch's
                _rank, arguments, nprocs=_RANKS, start_method="forkserver"
            )
        told = json.loads(_result(folder).read_text())
    found, delta = [_Round(**line) for line in told["rounds"]], _Delta(**told["delta"])
    counted = found[_WARM_UP:]
    samples = {
        "push_s": [one.push_s for one in counted],
        "gather_push_s": [one.gather_push_s for one in counted],
        "memcpy_s": [one.memcpy_s for one in counted],
        "over_gather": [one.push_s / one.gather_push_s for one in counted],
        "push_over_memcpy": [one.push_s / one.memcpy_s for one in counted],
        "delta_push_s": [delta.push_s],
    }
    contents = {one.digest for one in found}
    facts: dict[str, int | float | bool] = {
        "rank0_extra_bytes": max(one.extra_bytes for one in found),
        "rank0_extra_bytes_gather": max(one.extra_bytes_gather for one in found),
        "delta_bytes": delta.sent,
        "delta_over_unsharded": round(delta.sent / delta.sent_unsharded, 4),
        "bitwise_equal": all(one.equal for one in found)
        and len(contents) == len(found)
        and delta.equal,
    }
    return samples, facts


class _Size(NamedTuple):
    """Of the model.

    Attributes:
        mib: At least so large, MiB.
        blocks: So many, of three tensors each.
    """

    mib: int
    blocks: int

    @property
    def inner(self) -> int:
        """Rows of a layer: a multiple of four, so that every mesh shards it evenly."""
        words = (self.mib << 20) // 2 // self.blocks
        return max(4, 4 * math.ceil(words / (2 * _HIDDEN) / 4))

    @property
    def nbytes(self) -> int:
        return 2 * self.blocks * _HIDDEN * (2 * self.inner + 1)


class _Round(NamedTuple):
    """What rank 0 found in one round.

    Attributes:
        push_s: Until the last rank had pushed what it holds.
        gather_push_s: Until rank 0 had gathered and pushed.
        memcpy_s: One copy of as many bytes.
        extra_bytes: Growth of RssAnon in the push.
        extra_bytes_gather: Growth of RssAnon in the gather and its push.
        digest: Of the version.
        equal: Whether all pushes of the round gave it.
    """

    push_s: float
    gather_push_s: float
    memcpy_s: float
    extra_bytes: int
    extra_bytes_gather: int
    digest: str
    equal: bool


class _Delta(NamedTuple):
    """What rank 0 found where 1 % of the values changed.

    Attributes:
        push_s: Until the last rank had pushed what changed.
        sent: Bytes that all ranks sent.
        sent_unsharded: Bytes that one process sent for the same.
        equal: Whether both made one version.
    """

    push_s: float
    sent: int
    sent_unsharded: int
    equal: bool


def _result(folder: str) -> Path:
    return Path(folder, "rounds.json")


def _rank(rank: int, folder: str, address: str, form: str, size: _Size, rounds: int) -> None:
    """Take part in all rounds; rank 0 writes down what it found."""
    # Gloo tells on standard output who is connected; that is the report's.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # As torchrun has it: the ranks share the cores.
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=_RANKS)
    with Client(address) as client:
        trainer = _Trainer(client, _FORMS[form](size), size.nbytes)
        # What making the model left free would hide growth.
        ctypes.CDLL(None).malloc_trim(0)
        gc.disable()
        found = [trainer.round(number)._asdict() for number in range(_WARM_UP + rounds)]
        with Client(address) as alone:
            delta = trainer.delta(alone)._asdict()
    if rank == 0:
        _result(folder).write_text(json.dumps({"rounds": found, "delta": delta}))
    dist.destroy_process_group()


class _Trainer:
    """A rank: what it holds of the model, and how that comes to the server."""

    def __init__(self, client: Client, model: torch.nn.Module, nbytes: int) -> None:
        self._client = client
        self._model = model
        self._nbytes = nbytes
        self._first = dist.get_rank() == 0

    def round(self, number: int) -> _Round:
        """Change every byte, then push both ways; all ranks call it."""
        self._change()
        results: dict[str, list[PushResult]] = {}
        seconds: dict[str, float] = {}
        grown: dict[str, int] = {}
        ways = {"push": lambda: self._push(number), "gather_push": self._gather_push}
        for name in sorted(ways, reverse=number % 2 == 0):
            with self._growth() as peak:
                seconds[name], results[name] = self._timed(ways[name])
            grown[name] = peak[0]
        versions = {(result.version, result.content_digest) for result in results["push"]}
        ((_, digest), *others) = versions
        return _Round(
            push_s=seconds["push"],
            gather_push_s=seconds["gather_push"],
            memcpy_s=self._memcpy(),
            extra_bytes=grown["push"],
            extra_bytes_gather=grown["gather_push"],
            digest=digest,
            equal=not others and digest == results["gather_push"][0].content_digest,
        )

    def delta(self, alone: Client) -> _Delta:
        """Push what 1 % of changed values are, by all ranks and by one; all ranks call it.

        Args:
            alone: Of the rank that pushes all of it.
        """
        self._gathered_by(alone, "auto")
        # A version that is begun before another one must not be committed after it.
        dist.barrier()
        self._client.push(self._model, step=_DELTA_STEP)
        self._change_some()
        dist.barrier()
        started = time.perf_counter()
        result = self._client.push(self._model, step=_DELTA_STEP + 1)
        dist.barrier()
        seconds = time.perf_counter() - started
        unsharded = self._gathered_by(alone, "require")
        assert result.kind is PushKind.DELTA or not result.sent_bytes, result
        sent = torch.tensor(result.sent_bytes)
        dist.all_reduce(sent)
        if unsharded is None:
            return _Delta(seconds, int(sent), 0, equal=True)
        equal = unsharded.content_digest == result.content_digest
        return _Delta(seconds, int(sent), unsharded.sent_bytes, equal)

    def _locals(self) -> Iterator[torch.Tensor]:
        """Yield what this rank holds, as whole numbers."""
        for parameter in self._model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            yield local.detach().view(torch.int16)

    def _change(self) -> None:
        for local in self._locals():
            local.add_(0x0101)

    def _change_some(self) -> None:
        # The last bit, as a step of training changes it; replicas change alike.
        for number, local in enumerate(self._locals()):
            torch.manual_seed(number)
            flat = local.view(-1)
            flat[torch.randint(len(flat), (max(1, len(flat) // 100),))] ^= 1

    def _timed(self, way: Callable[[], PushResult | None]) -> tuple[float, list[PushResult]]:
        """Return the seconds until the last rank was done, and what those that pushed got."""
        dist.barrier()
        started = time.perf_counter()
        result = way()
        dist.barrier()
        seconds = time.perf_counter() - started
        results: list[PushResult | None] = [None] * _RANKS
        dist.all_gather_object(results, result)
        pushed = [one for one in results if one is not None]
        assert {one.way for one in pushed if one.sent_bytes} == {TransferPath.SAME_HOST}, pushed
        assert sum(one.sent_bytes for one in pushed) >= self._nbytes, pushed
        return seconds, pushed

    def _push(self, step: int) -> PushResult:
        return self._client.push(self._model, step=step, delta="never")

    def _gather_push(self) -> PushResult | None:
        return self._gathered_by(self._client, "never")

    def _gathered_by(
        self, client: Client, delta: Literal["auto", "never", "require"]
    ) -> PushResult | None:
        gathered = get_model_state_dict(self._model, options=_GATHERED)
        return client.push(gathered, delta=delta) if self._first else None

    def _memcpy(self) -> float:
        """Return the seconds of one copy; the other ranks wait."""
        seconds = 0.0
        if self._first:
            source, target = (np.ones(self._nbytes, dtype=np.uint8) for _ in range(2))
            started = time.perf_counter()
            np.copyto(target, source)
            seconds = time.perf_counter() - started
        dist.barrier()
        return seconds

    @contextlib.contextmanager
    def _growth(self) -> Iterator[list[int]]:
        """Yield by how many bytes RssAnon of rank 0 rose at most in the block; told after it."""
        pids, stop, peak = [os.getpid()], threading.Event(), [0]
        before = rss_anon(pids)

        def watch() -> None:
            while not stop.wait(_SAMPLE_S):
                peak[0] = max(peak[0], rss_anon(pids) - before)

        thread = threading.Thread(target=watch, name="rss")
        if self._first:
            thread.start()
        try:
            yield peak
        finally:
            stop.set()
            if self._first:
                thread.join()


class _Block(torch.nn.Module):
    """Two layers and a norm: three tensors."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(_HIDDEN)
        self.up = torch.nn.Linear(_HIDDEN, inner, bias=False)
        self.down = torch.nn.Linear(inner, _HIDDEN, bias=False)


def _sharded(size: _Size, shard: Callable[[torch.nn.Module], object]) -> torch.nn.Module:
    """Return a model that was sharded block by block, so that no rank ever holds all of it."""
    blocks = []
    for number in range(size.blocks):
        with torch.device("meta"):
            block = _Block(size.inner).bfloat16()
        block.to_empty(device="cpu")
        for place, parameter in enumerate(block.parameters()):
            words = parameter.detach().view(torch.int16).view(-1)
            # No two rows are alike, so one in another's place would be seen.
            words.copy_(
                (torch.arange(len(words), dtype=torch.int32) * _HASH >> 16) + number + place
            )
        shard(block)
        blocks.append(block)
    return torch.nn.ModuleList(blocks)


def _fsdp2(size: _Size) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (_RANKS,))
    return _sharded(size, lambda block: fully_shard(block, mesh=mesh))


def _hsdp(size: _Size) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return _sharded(size, lambda block: fully_shard(block, mesh=mesh))


def _fsdp_tp(size: _Size) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def shard(block: torch.nn.Module) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        fully_shard(parallelize_module(block, mesh["tensor"], plan), mesh=mesh["data"])

    return _sharded(size, shard)


#: By the names that figures have.
_FORMS: dict[str, Callable[[_Size], torch.nn.Module]] = {
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "fsdp_tp": _fsdp_tp,
}


if __name__ == "__main__":
    main()
