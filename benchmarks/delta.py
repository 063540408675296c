"""How small a delta is, and how long it takes, against a plain copy of the same bytes.

The tensors have the shapes of a real 0.5 B model. The trainer's float32 weights are normal with a
deviation of 0.02 (norms are one), and one step of an Adam-like optimizer moves each by the learning
rate times a normal number of deviation 0.2; before and after are rounded to bfloat16. The learning
rate is found so that the share of elements that differ is `density` within 2 %.

bytes_per_change          all bytes of all shards over the changes, with zstd; _raw: without
entropy_floor             order 0, in bytes: of the positions, H(p)/p, and of the difference in
                          units in the last place; _given_base: both given the base's exponent
encode_over_memcpy        compare and pack into planes, and zstd; _pack and _zstd are its parts
encode_all_over_memcpy    everything until the shards are there: also checksums and the digest of
                          every new tensor
decode_over_memcpy        unpack, patch in place and record the undo
decode_check_over_memcpy  checksums and bounds of the shards, before
decode_digest_over_memcpy digest of every whole tensor, after
decode_all_over_memcpy    these three
memcpy_two_threads_faster one thread's time over that of two, for the copy of all bytes: what two
                          cores gain here where only memory counts. About 1.0 tells that something
                          else has one of them, and the next two say nothing then
encode_two_threads_faster the same for comparing, packing and zstd
decode_two_threads_faster the same for unpacking, patching and recording the undo

Each time is over that of one copy of all bytes into memory that was touched before, in the same
round and by one thread. For *_two_threads_faster one and two threads take turns, three each, and
the quickest of either count. pairs: an int32 index and a bfloat16 value for each change. xor: dense
XOR and zstd level 1. Every round trip is compared with the new bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.delta_codecs import Ours, Pairs, Xor
from benchmarks.delta_model import Model, floors
from weightsync.delta import warm_up

__all__ = ["main"]

_DENSITIES = (0.001, 0.01, 0.05, 0.30)


def _memcpy(model: Model, target: Any) -> float:
    begun = time.perf_counter()
    np.copyto(target, model.new)
    return time.perf_counter() - begun


def _two_threads(ours: Ours, shards: list[Any]) -> dict[str, float]:
    """Return how much faster two threads are than one, copying beside encoding and decoding."""
    works: dict[str, Callable[[ThreadPoolExecutor | None], float]] = {
        "memcpy": ours.copy_all,
        "encode": ours.pack_all,
        "decode": lambda pool: ours.patch_all(shards, pool),
    }
    found = {}
    with ThreadPoolExecutor(2) as pool:
        for name, work in works.items():
            turns = [(work(None), work(pool)) for _ in range(3)]
            one, two = (min(turn[at] for turn in turns) for at in range(2))
            found[f"{name}_two_threads_faster"] = one / two
    return found


def _round(
    model: Model, target: Any, ours: Ours, others: dict[str, Pairs | Xor]
) -> dict[str, float]:
    """Return the figures of one round."""
    copy = min(_memcpy(model, target) for _ in range(3))
    packing, zstd = ours.pack_parts()
    begun = time.perf_counter()
    shards = ours.encode(zstd=True)
    encoded = time.perf_counter() - begun
    parts = ours.decode_parts(shards)
    found = {
        "memcpy_gbps": 2 * len(target) / copy / 1e9,
        "encode_pack_over_memcpy": packing / copy,
        "encode_zstd_over_memcpy": zstd / copy,
        "encode_over_memcpy": (packing + zstd) / copy,
        "encode_all_over_memcpy": encoded / copy,
        "decode_over_memcpy": parts["patch"] / copy,
        "decode_check_over_memcpy": parts["check"] / copy,
        "decode_digest_over_memcpy": parts["digest"] / copy,
        "decode_all_over_memcpy": parts["all"] / copy,
        **_two_threads(ours, shards),
    }
    for name, codec in others.items():
        theirs = codec.round()
        found[f"{name}_bytes_per_change"] = theirs["bytes"] / model.changed
        found[f"{name}_encode_over_memcpy"] = theirs["encode"] / copy
        found[f"{name}_decode_over_memcpy"] = theirs["decode"] / copy
    return found


def _row(model: Model, target: Any, density: float, rounds: int) -> dict[str, Any]:
    """Return all figures at one density: medians, and how far the rounds lay apart."""
    row: dict[str, Any] = {"density": density, "density_found": model.change(density)}
    floor, given = floors(model)
    ours = Ours(model, target)
    sizes = {zstd: sum(map(len, ours.encode(zstd=zstd))) / model.changed for zstd in (True, False)}
    row |= {
        "bytes_per_change": report.median([sizes[True]]),
        "bytes_per_change_raw": report.median([sizes[False]]),
        "entropy_floor": report.median([floor]),
        "entropy_floor_given_base": report.median([given]),
        "over_entropy_floor": report.median([sizes[True] / floor]),
    }
    others: dict[str, Pairs | Xor] = {"pairs": Pairs(model, target), "xor": Xor(model, target)}
    samples = [_round(model, target, ours, others) for _ in range(rounds)]
    figures = {name: [sample[name] for sample in samples] for name in samples[0]}
    row |= {name: report.median(values) for name, values in figures.items()}
    row["spread"] = {
        name: [report.median([edge(values)]) for edge in (min, max)]
        for name, values in figures.items()
    }
    return row


def main() -> None:
    """Run the benchmark from the command line."""
    parser = report.arguments(__doc__)
    parser.add_argument("--layers", type=int, default=24, help="of 14.9 M elements (default 24)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="of 896 elements each")
    parser.add_argument("--density", type=float, action="append", help="instead of all four")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    kernels = warm_up()
    model = Model.make(options.layers, options.vocabulary)
    target = np.empty_like(model.new)
    densities = options.density or _DENSITIES
    rows = [_row(model, target, density, options.rounds) for density in densities]
    parameters = {
        "elements": len(model.new),
        "tensors": len(model.items),
        "layers": options.layers,
        "vocabulary": options.vocabulary,
        "rounds": options.rounds,
        "kernels": kernels,
        "dtype": "BF16",
    }
    if options.json:
        report.emit("delta", parameters, {}, {"rows": rows}, as_json=True)
        return
    for row in rows:
        figures = {name: value for name, value in row.items() if name != "spread"}
        report.emit("delta", parameters, {}, figures, as_json=False)


if __name__ == "__main__":
    main()
