"""How small a delta is, and how long it takes, against a plain copy of the same bytes.

The tensors have the shapes of a real 0.5 B model. A trainer's master weights are normal with a
deviation of 0.02 (norms are one), and one step of an Adam-like optimizer moves each by the learning
rate times a normal number of deviation 0.2; base and new are both rounded to bfloat16. The learning
rate is found so that the share of elements that differ is `density` within 2 %.

bytes_per_change        of all shards, containers and all, with zstd and without (_raw)
entropy_floor           order 0, in bytes: of the positions, H(p)/p, and of the difference in units
                        in the last place; _given_base: both given the exponent of the base, which
                        both sides know
encode_over_memcpy      compare and pack into planes, and zstd where it is used; its parts apart
decode_over_memcpy      unpack, patch in place and record the undo; its parts apart
encode_all, decode_all  everything that a push or a fetcher does: checksums, containers and the
                        digest of each whole new tensor
two_threads_faster      one thread's time over that of two, for encoding and decoding as above

Each time is over that of one copy of all the bytes into memory that was touched before, by one
thread, in the same round. pairs: int32 index and bfloat16 value for each change, with the same
compiler. xor: dense XOR, then zstd level 1. Every round trip is compared with the new bytes.
"""

from __future__ import annotations

from benchmarks import report
from benchmarks.delta_codecs import Ours, Pairs, Xor
from benchmarks.delta_model import Model, floors
from weightsync.delta import warm_up

__all__ = ["main"]

_DENSITIES = (0.001, 0.01, 0.05, 0.30)
