"""How the time of a push grows with the bytes and with the tensors of a version.

cost_<size>            seconds from the client's call until the version is staged, over the seconds
                       in which one thread copies as many bytes into a warm block, for versions of
                       0.25, 1 and 4 GiB
flat                   the largest of these costs over the smallest; wanted at most 1.15
push_s_<n>_tensors     seconds of that call for 0.25 GiB in 10, 1,000 and 20,000 tensors
cost_<n>_tensors       the same over the seconds of the copy
microseconds_per_tensor
                       how much longer the push with the most tensors takes than that with the
                       fewest, per tensor that it has more; wanted at most 50
adopt_s_<n>_tensors    seconds in which a server takes over an engine whose checkpoint has so many
                       tensors, of as many bytes: until it serves that, proved, as version 1
adopt_microseconds_per_tensor, kib_per_tensor
                       the same of these seconds, and of the memory of its own that the server has
                       at most while it adopts the checkpoint and takes the first push

Every figure is the median of its rounds. In each round every version is pushed once, a copy before
each, and every byte changes between two pushes. A version of each kind has a server of its own,
because a server holds versions of one model: its slots are warm. Shards are of 64 MiB. The 4 GiB
are the same 1 GiB under four names. The store is memory://, or the server's usual one in the folder
that --store names; then the time ends when the version is durable, too.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from benchmarks import report
from benchmarks.servers import free_port, peak_memory, weightsync_server
from weightsync_client import Client, Residency

__all__ = ["Kind", "figures", "main", "split"]

_SHARD_BYTES = 64 << 20
_BLOCK_BYTES = 64 << 20
#: Tensors of each version that shows the bytes, per smallest size.
_TENSORS = 100
#: Rounds that warm both slots and are not counted.
_WARM_UP = 2

_Words = npt.NDArray[np.uint64]
_Tensors = dict[str, npt.NDArray[np.uint16]]


class Kind(NamedTuple):
    """One kind of version.

    Attributes:
        name: In the figures.
        size: Bytes of its tensors.
        tensors: How many there are.
    """

    name: str
    size: int
    tensors: int


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="smallest size (default 256 MiB)")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 16], help="of that size")
    parser.add_argument("--tensors", type=int, nargs="+", default=[10, 1000, 20000])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--store", type=Path, help="folder for a durable store (default: memory)")
    options = parser.parse_args()
    least = options.mib << 20
    by_size = [Kind(f"{n * options.mib}_mib", n * least, n * _TENSORS) for n in options.factors]
    by_count = [Kind(f"{n}_tensors", least, n) for n in options.tensors]
    # No version needs more memory than this: larger ones name it several times.
    words = np.arange(min(4 * least, max(kind.size for kind in by_size)) // 8, dtype=np.uint64)
    seconds: dict[str, list[float]] = {}
    copies: dict[str, list[float]] = {}
    for kinds in (by_size, by_count):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ws-bench-")))
            clients = _clients(stack, folder, kinds, options.store)
            _measure(clients, words, options.rounds, seconds, copies)
    parameters = {
        "rounds": options.rounds,
        "shard_bytes": _SHARD_BYTES,
        "store": "memory://" if options.store is None else "local",
    }
    taken: dict[str, list[float]] = {}
    memory: dict[str, list[float]] = {}
    for kind in (by_count[0], by_count[-1]):
        for _ in range(options.rounds):
            seconds_taken, kib = _adopt(kind, words)
            taken.setdefault(kind.name, []).append(seconds_taken)
            memory.setdefault(kind.name, []).append(kib)
    samples = {f"push_s_{name}": values for name, values in seconds.items()}
    samples |= {f"adopt_s_{name}": values for name, values in taken.items()}
    samples |= {f"adopt_kib_{name}": values for name, values in memory.items()}
    samples |= {
        f"cost_{name}": [push / copy for push, copy in zip(values, copies[name], strict=True)]
        for name, values in seconds.items()
    }
    told = figures(by_size, by_count, samples)
    report.emit("scale", parameters, samples, told, as_json=options.json)


def figures(
    by_size: Sequence[Kind], by_count: Sequence[Kind], samples: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return what the medians of all versions come to."""
    costs = [report.median(samples[f"cost_{kind.name}"]) for kind in by_size]
    few, many = by_count[0], by_count[-1]

    def per_tensor(of: str) -> float:
        medians = [statistics.median(samples[f"{of}_{kind.name}"]) for kind in (few, many)]
        return (medians[1] - medians[0]) / (many.tensors - few.tensors)

    return {
        "flat": round(max(costs) / min(costs), 3),
        "microseconds_per_tensor": round(per_tensor("push_s") * 1e6, 2),
        "adopt_microseconds_per_tensor": round(per_tensor("adopt_s") * 1e6, 2),
        "kib_per_tensor": round(per_tensor("adopt_kib"), 2),
    }


def split(words: _Words, kind: Kind) -> _Tensors:
    """Return tensors that hold as many bytes as a version of this kind, or a few less.

    A version larger than what there is names it several times.
    """
    flat = words.view(np.uint16)
    times = -(-kind.size // words.nbytes)
    per_pass = kind.tensors // times
    cuts = np.linspace(0, kind.size // 2 // times, per_pass + 1).astype(int)
    return {
        f"copy{copy}.layers.{index}.weight": flat[cuts[index] : cuts[index + 1]]
        for copy in range(times)
        for index in range(per_pass)
    }


def _clients(
    stack: contextlib.ExitStack, folder: Path, kinds: Sequence[Kind], store: Path | None
) -> dict[Kind, Client]:
    clients = {}
    for kind in kinds:
        place = folder / kind.name
        place.mkdir()
        # A flag that comes again takes the place of the first.
        durable = [] if store is None else ["--store", str(store / kind.name)]
        address = f"127.0.0.1:{free_port()}"
        stack.enter_context(weightsync_server(place, [address], *durable))
        clients[kind] = stack.enter_context(Client(address))
    return clients


def _measure(
    clients: Mapping[Kind, Client],
    words: _Words,
    rounds: int,
    seconds: dict[str, list[float]],
    copies: dict[str, list[float]],
) -> None:
    sources = {kind: split(words, kind) for kind in clients}
    block = np.ones(_BLOCK_BYTES // 8, dtype=np.uint64)
    gc.disable()
    for number in range(_WARM_UP + rounds):
        for kind, client in clients.items():
            words += np.uint64(0x0101010101010101)
            copied = _copy(words, block, kind.size)
            pushed = _push(client, sources[kind])
            if number >= _WARM_UP:
                copies.setdefault(kind.name, []).append(copied)
                seconds.setdefault(kind.name, []).append(pushed)
    gc.enable()


def _copy(words: _Words, block: _Words, size: int) -> float:
    """Return the seconds in which as many bytes are copied, a block at a time."""
    started = time.perf_counter()
    for at in range(0, size // 8, len(block)):
        begin = at % len(words)
        part = words[begin : min(begin + len(block), begin + size // 8 - at)]
        np.copyto(block[: len(part)], part)
    return time.perf_counter() - started


def _push(client: Client, tensors: _Tensors) -> float:
    started = time.perf_counter()
    pushed = client.push(tensors, shard_bytes=_SHARD_BYTES, delta="never", same_host="never")
    taken = time.perf_counter() - started
    version = client.get_version(pushed.version)
    assert version.residency == Residency.STAGED, version
    assert version.tensor_count == len(tensors), version
    return taken


def _adopt(kind: Kind, words: _Words) -> tuple[float, float]:
    """Return the seconds until a checkpoint is served, and the most KiB of memory for that."""
    tensors = split(words, kind)
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        folder = Path(name)
        model = folder / "model.safetensors"
        save_file(tensors, model)
        address = f"127.0.0.1:{free_port()}"
        started = time.perf_counter()
        running = weightsync_server(folder, [address], "--model", str(model), engine="memory")
        with running as server, Client(address) as client, peak_memory(server.pid) as peak:
            while not client.status().models[0].live_version:
                time.sleep(0.02)
            taken = time.perf_counter() - started
            _push(client, tensors)
            return taken, peak[0] / 1024


if __name__ == "__main__":
    main()
