"""The compiled loops that find what differs in a block: which elements, where, and their values.

Passes without branches on data beat one clever loop. Three ways lead to places and values: vectors
that pack (AVX-512 VBMI2), shuffles of eight elements where many differ (SSSE3), and bit by bit
everywhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsync.delta.kernels.elementwise import mark
from weightsync.delta.kernels.intrinsics import (
    count_ones,
    first_one,
    load8,
    load16,
    load32,
    load64,
    pack_changes,
    shuffle_changes,
    shuffle_places,
    store8,
    store16,
    store32,
    store64,
)
from weightsync.jit.compiling import inner
from weightsync.jit.processor import PACKS, SHUFFLES, vectors

__all__ = [
    "BLOCK",
    "GROUP",
    "MASKS",
    "PLACES",
    "RANKS",
    "VALUES",
    "find",
    "make_scratch",
    "mark_tail",
]

#: Elements of one block: both versions of two bytes fit into the first cache, places into 16 bits.
BLOCK = 1 << 13
#: Elements of one mask.
GROUP = 64
#: Where scratch holds masks, places, values, two copies of the last elements, and for each mask of
#: 8 bits the places of its bits, in elements and in bytes. Vectors are written whole.
MASKS = 0
PLACES = MASKS + BLOCK // 8 + 64
VALUES = PLACES + 2 * BLOCK + 256
_TAILS = VALUES + 8 * (BLOCK + GROUP) + 256
RANKS = _TAILS + 2 * 8 * GROUP
ORDERS = RANKS + 8 * 256
_SCRATCH = ORDERS + 16 * 256

#: Changes in a block from which shuffles pay, and up to which most masks are empty.
_DENSE, _SPARSE = BLOCK // 8, BLOCK // 256
_PACKS, _SHUFFLES = vectors() == PACKS, vectors() == SHUFFLES


def make_scratch() -> Any:
    """Return one thread's scratch memory."""
    scratch = np.zeros(_SCRATCH, np.uint8)
    for mask in range(256):
        places = np.flatnonzero(np.unpackbits(np.uint8(mask), bitorder="little"))
        rank = RANKS + 8 * mask
        scratch[rank : rank + len(places)] = places
        order = ORDERS + 16 * mask
        scratch[order : order + 2 * len(places)] = np.stack([2 * places, 2 * places + 1], 1).ravel()
    return scratch


@inner
def mark_tail(base: Any, new: Any, left: Any, width: Any, scratch: Any) -> Any:
    """Return the mask of fewer than 64 elements, without a look behind them."""
    tails = scratch + _TAILS
    for at in range(0, 2 * 8 * GROUP, 8):
        store64(tails + at, 0)
    for at in range(left * width):
        store8(tails + at, load8(base + at))
        store8(tails + 8 * GROUP + at, load8(new + at))
    mark(tails, tails + 8 * GROUP, 1, width, tails)
    return load64(tails)


@inner
def _places_of(mask: Any, first: Any, places: Any) -> Any:
    """Write the places of bits that are set, up to two more; return how many there are."""
    count = count_ones(mask)
    done = 0
    while True:
        # Two at a time, needed or not, spare most of the guesses at how many there are.
        store16(places + 2 * done, first + first_one(mask))
        mask &= mask - 1
        store16(places + 2 * done + 2, first + first_one(mask))
        mask &= mask - 1
        done += 2
        if done >= count:
            return count


@inner
def _flatten(masks: Any, words: Any, sparse: Any, places: Any) -> Any:
    """Write the places of all bits that are set; return how many there are."""
    count = 0
    for at in range(words):
        mask = load64(masks + 8 * at)
        # A guess that is mostly right where few words hold any.
        if mask or not sparse:
            count += _places_of(mask, GROUP * at, places + 2 * count)
    return count


@inner
def _shuffle(base: Any, new: Any, words: Any, scratch: Any, values: Any) -> Any:
    """Write places and differences of two bytes, eight elements at a time; return their count."""
    count = 0
    for at in range(words):
        mask = load64(scratch + MASKS + 8 * at)
        for part in range(8):
            byte = mask >> (8 * part) & 255
            place = GROUP * at + 8 * part
            left, right = base + 2 * place, new + 2 * place
            shuffle_changes(left, right, byte, scratch + ORDERS, values + 2 * count)
            shuffle_places(place, byte, scratch + RANKS, scratch + PLACES + 2 * count)
            count += count_ones(byte)
    return count


@inner
def _take(
    base: Any, new: Any, places: Any, count: Any, width: Any, relative: Any, values: Any
) -> Any:
    """Write the values, or the differences of two bytes, at these places."""
    if relative:
        for at in range(count):
            place = 2 * load16(places + 2 * at)
            store16(values + 2 * at, load16(new + place) - load16(base + place))
    elif width == 1:
        for at in range(count):
            store8(values + at, load8(new + load16(places + 2 * at)))
    elif width == 2:
        for at in range(count):
            store16(values + 2 * at, load16(new + 2 * load16(places + 2 * at)))
    elif width == 4:
        for at in range(count):
            store32(values + 4 * at, load32(new + 4 * load16(places + 2 * at)))
    else:
        for at in range(count):
            store64(values + 8 * at, load64(new + 8 * load16(places + 2 * at)))


@inner
def _pack(base: Any, new: Any, words: Any, scratch: Any, values: Any) -> Any:
    """Do what the three above do for differences of two bytes, with vectors that pack."""
    count = 0
    for at in range(words):
        mask = 0
        for half in range(2):
            place = GROUP * at + 32 * half
            found = pack_changes(
                base + 2 * place,
                new + 2 * place,
                place,
                scratch + PLACES + 2 * count,
                values + 2 * count,
            )
            mask |= found << (32 * half)
            count += count_ones(found)
        store64(scratch + MASKS + 8 * at, mask)
    return count


@inner
def find(
    base: Any,
    new: Any,
    elements: Any,
    width: Any,
    relative: Any,
    before: Any,
    scratch: Any,
    values: Any,
) -> Any:
    """Write masks, places and values of a block; return how many elements differ.

    `before` tells how many did in the block before, to choose the quicker way.
    """
    words, left = elements // GROUP, elements % GROUP
    masks, places = scratch + MASKS, scratch + PLACES
    if _PACKS and relative:
        count = _pack(base, new, words, scratch, values)
    else:
        mark(base, new, words, width, masks)
        if _SHUFFLES and relative and before > _DENSE:
            count = _shuffle(base, new, words, scratch, values)
        else:
            count = _flatten(masks, words, before < _SPARSE, places)
            _take(base, new, places, count, width, relative, values)
    if left:
        at = GROUP * words * width
        mask = mark_tail(base + at, new + at, left, width, scratch)
        store64(masks + 8 * words, mask)
        more = _places_of(mask, GROUP * words, places + 2 * count)
        end = values + (2 if relative else width) * count
        _take(base, new, places + 2 * count, more, width, relative, end)
        count += more
    return count
