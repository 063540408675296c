"""Other bytes with the same XXH3: what whoever wants to can make, and BLAKE3 is there for.

XXH3 takes 1024 bytes as 16 stripes of 8 numbers. Number `i` of a stripe, `x`, meets a constant `k`
and goes into two sums: the halves of `x ^ k` are multiplied into sum `i`, and `x` itself is added
to its neighbour. Both sums are linear in parts of `x` that one is free to choose.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

__all__ = ["BLOCK", "forge_block"]

BLOCK = 1024
_STRIPES, _LANES = 16, 8
_LOW, _ALL = (1 << 32) - 1, (1 << 64) - 1
#: Of the stripes the last ones put the sums right; the others are the forger's.
_FREE = _STRIPES - 5
_SOURCE = Path(__file__).parents[2] / "weightsync/delta/kernels/copying.h"


def forge_block(block: bytes, payload: bytes) -> bytes:
    """Return other bytes for 1024 that stand first in more than 1024, whose XXH3 they leave alone.

    Args:
        block: What stands there.
        payload: At most 704 bytes that shall stand there.
    """
    found = [list(struct.unpack_from("<8Q", block, 64 * s)) for s in range(_STRIPES)]
    wanted = (payload + block[len(payload) :])[: 64 * _FREE]
    forged = [list(struct.unpack_from("<8Q", wanted, 64 * s)) for s in range(_FREE)]
    forged += [[0] * _LANES for _ in range(_FREE, _STRIPES)]
    for lane in range(_LANES):
        keys = [_key(stripe, lane) for stripe in range(_STRIPES)]
        products = sum(_product(found[s][lane], keys[s]) for s in range(_STRIPES))
        products -= sum(_product(forged[s][lane], keys[s]) for s in range(_FREE))
        sums = sum(row[lane] for row in found) - sum(forged[s][lane] for s in range(_FREE))
        for at, number in enumerate(_right(products & _ALL, sums, keys[_FREE:])):
            forged[_FREE + at][lane] = number
    return b"".join(struct.pack("<8Q", *row) for row in forged)


def _right(products: int, sums: int, keys: list[int]) -> list[int]:
    """Return five numbers whose products and sum are as asked for."""
    # Two are multiplied by 2**31 and one by 1: any product is made of them.
    high = products >> 31
    two = [min(high // 2, _LOW), min(high - high // 2, _LOW)]
    one = products - (sum(two) << 31)
    numbers = [
        (one << 32 | 1) ^ keys[0],
        (two[0] << 32 | 1 << 31) ^ keys[1],
        (two[1] << 32 | 1 << 31) ^ keys[2],
    ]
    # Of the others one half is 0: they add to the sum alone.
    rest = (sums - sum(numbers) - (keys[3] & _LOW) - (keys[4] & ~_LOW)) & _ALL
    return [*numbers, (rest & ~_LOW) | (keys[3] & _LOW), (keys[4] & ~_LOW) | (rest & _LOW)]


def _product(number: int, key: int) -> int:
    return ((number ^ key) & _LOW) * ((number ^ key) >> 32)


def _key(stripe: int, lane: int) -> int:
    (key,) = struct.unpack_from("<Q", _secret(), 8 * (stripe + lane))
    return int(key)


def _secret() -> bytes:
    """Return XXH3's constants, as our own kernel has them."""
    text = re.search(r"secret\[192\] = \{(.*?)\}", _SOURCE.read_text(), re.DOTALL)
    assert text is not None
    return bytes(int(number, 0) for number in re.findall(r"0x[0-9a-fA-F]+|\d+", text[1]))
