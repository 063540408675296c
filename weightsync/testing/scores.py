"""What the in-memory engine computes of sequences: numbers made of the bytes that it holds."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Mapping, Sequence


def memory_logprobs(tensors: Mapping[str, bytes], tokens: Sequence[int]) -> list[float]:
    """Return the log probability of every token but the first, from -5 to below 0.

    They depend on the bytes of all tensors, on the token and on the one before it, and on nothing
    else, so that a test computes what a trainer of the same bytes does.
    """
    content = 0
    for name in sorted(tensors):
        content = zlib.crc32(tensors[name], zlib.crc32(name.encode(), content))
    pairs = itertools.pairwise(tokens)
    return [_logprob(struct.pack("<QQ", before, token), content) for before, token in pairs]


def _logprob(pair: bytes, content: int) -> float:
    # In 32 bits, as it travels.
    value = -5.0 + 4.9999 * zlib.crc32(pair, content) / (1 << 32)
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found
