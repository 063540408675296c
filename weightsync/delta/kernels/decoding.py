"""The compiled loops that read streams and patch tensors. Addresses in, 0 or what is wrong out.

Streams are hostile, and their sender may share their memory: each loop proves what it needs as it
goes, of the very bytes that it uses.
"""

from __future__ import annotations

from typing import Any

from weightsync.delta.kernels.elementwise import load, load_place, store
from weightsync.delta.kernels.intrinsics import (
    count_ones,
    first_one,
    load8,
    load16,
    load64,
    prefetch,
    spread_gaps,
    spread_signs,
    store8,
    store16,
    store32,
    store64,
)
from weightsync.jit.compiling import inner, kernel
from weightsync.jit.processor import PACKS, vectors

__all__ = [
    "add_changes",
    "join_planes",
    "read_bitmap",
    "read_gaps",
    "read_signed",
    "scatter_values",
    "shift_values",
]

_GROUP = 64
#: Entries of one vector.
_LANES = 16
_PACKS = vectors() == PACKS
#: Changes between the one that is written and the one whose line is fetched.
_AHEAD = 96


@inner
def _put(index: Any, at: Any, size: Any, value: Any) -> Any:
    if size == 4:
        store32(index + 4 * at, value)
    else:
        store64(index + 8 * at, value)


@inner
def _spread(low: Any, entries: Any, index: Any, changed: Any) -> Any:
    """Write what whole vectors of entries mark, for as long as there is room for all of a vector.

    The last entry is left over. Returns how many entries were read and positions written, and where
    the last entry lies.
    """
    at, filled, position = 0, 0, -1
    while at + _LANES < entries and filled + _LANES <= changed:
        told = spread_gaps(low + at, position, index + 4 * filled)
        position += told >> 8
        filled += told & 255
        at += _LANES
    return at, filled, position


@kernel
def read_gaps(
    low: Any, high: Any, entries: Any, elements: Any, index: Any, size: Any, changed: Any
) -> Any:
    """Write the positions that entries mark.

    Args:
        low: Address of the entries, or of their low bytes.
        high: Address of their high bytes; 0 where entries are bytes.
        entries: How many there are.
        elements: Elements of the tensor.
        index: Address of room for `changed` positions.
        size: Bytes of a position, 4 or 8.
        changed: Positions that must be marked.
    """
    begin, filled, position, marks = 0, 0, -1, 0
    if _PACKS and size == 4 and not high:
        begin, filled, position = _spread(low, entries, index, changed)
    skip = 65535 if high else 255
    for at in range(begin, entries):
        # A skip writes too, and what it wrote is overwritten, so that there is no guess: behind
        # the last mark there may be none.
        if filled == changed:
            return 1
        entry = load8(low + at)
        if high:
            entry |= load8(high + at) << 8
        marks = 1 if entry != skip else 0
        position += entry + marks
        _put(index, filled, size, position)
        filled += marks
    return 0 if filled == changed and marks and position < elements else 1


@kernel
def read_bitmap(plane: Any, elements: Any, index: Any, size: Any, changed: Any) -> Any:
    """Write the positions of bits that are set; see `read_gaps`."""
    words, left = (elements + 7) // 8 // 8, (elements + 7) // 8 % 8
    rest = 0
    for at in range(left):
        rest |= load8(plane + 8 * words + at) << (8 * at)
    filled = 0
    for at in range(words + 1):
        mask = load64(plane + 8 * at) if at < words else rest
        if count_ones(mask) > changed - filled:
            return 1
        while mask:
            _put(index, filled, size, _GROUP * at + first_one(mask))
            filled += 1
            mask &= mask - 1
    return 0 if filled == changed and load_place(index, changed - 1, size) < elements else 1


@inner
def _bits(plane: Any, at: Any, count: Any) -> Any:
    """Return the bits of up to 64 changes, with no look behind the last byte."""
    if count >= _GROUP:
        return load64(plane + at // 8)
    mask = 0
    for byte in range((count + 7) // 8):
        mask |= load8(plane + at // 8 + byte) << (8 * byte)
    return mask


@kernel
def read_signed(
    signs: Any,
    larges: Any,
    magnitudes: Any,
    low: Any,
    high: Any,
    changed: Any,
    large: Any,
    wide: Any,
    out: Any,
) -> Any:
    """Write `changed` differences from the planes of SM."""
    tail = changed % 8
    if tail and (load8(signs + changed // 8) | load8(larges + changed // 8)) >> tail:
        return 1
    for at in range(0, changed, _GROUP):
        left = changed - at
        sign, mask = _bits(signs, at, left), _bits(larges, at, left)
        large -= count_ones(mask)
        if large < 0:
            return 1
        if left >= _GROUP:
            spread_signs(sign, out + 2 * at)
        else:
            for each in range(left):
                store16(out + 2 * (at + each), -1 if sign >> each & 1 else 1)
        while mask:
            each = first_one(mask)
            value = load8(magnitudes) + 2
            magnitudes += 1
            if value == 257:
                wide -= 1
                if wide < 0:
                    return 1
                value = load8(low) | load8(high) << 8
                low += 1
                high += 1
                if value < 257 or value > 32768:
                    return 1
            # A bit behind the last difference could pass here, were the memory changed meanwhile.
            if each < left:
                store16(out + 2 * (at + each), -value if sign >> each & 1 else value)
            mask &= mask - 1
    return 0 if large == 0 and wide == 0 else 1


@kernel
def join_planes(planes: Any, width: Any, changed: Any, out: Any) -> Any:
    """Write words of which each plane holds one byte; `planes` is the address of addresses."""
    for plane in range(width):
        source = load64(planes + 8 * plane)
        for at in range(changed):
            store8(out + width * at + plane, load8(source + at))
    return 0


@kernel
def add_changes(base: Any, index: Any, size: Any, changed: Any, delta: Any) -> Any:
    """Turn differences of two bytes into values; every position was proved to be in the base."""
    for at in range(changed):
        # Any address is harmless to prefetch, so that behind the end the last one serves.
        prefetch(base + 2 * load_place(index, min(at + _AHEAD, changed - 1), size))
        value = load16(base + 2 * load_place(index, at, size)) + load16(delta + 2 * at)
        store16(delta + 2 * at, value)
    return 0


@kernel
def shift_values(target: Any, index: Any, size: Any, changed: Any, delta: Any, old: Any) -> Any:
    """Add differences of two bytes to a tensor; `delta` becomes the values, `old` those before."""
    for at in range(changed):
        prefetch(target + 2 * load_place(index, min(at + _AHEAD, changed - 1), size))
        place = target + 2 * load_place(index, at, size)
        before = load16(place)
        store16(old + 2 * at, before)
        value = before + load16(delta + 2 * at)
        store16(delta + 2 * at, value)
        store16(place, value)
    return 0


@kernel
def scatter_values(
    target: Any,
    elements: Any,
    index: Any,
    size: Any,
    changed: Any,
    width: Any,
    value: Any,
    old: Any,
) -> Any:
    """Write values to a tensor, and what was there into `old`; nothing if one lies outside."""
    wrong = 0
    # A negative position of four bytes reads as one beyond 2^31.
    limit = min(elements, 1 << 31) if size == 4 else elements
    for at in range(changed):
        place = load_place(index, at, size)
        wrong |= 1 if place < 0 or place >= limit else 0
    if wrong:
        return 1
    for at in range(changed):
        prefetch(target + width * load_place(index, min(at + _AHEAD, changed - 1), size))
        place = target + width * load_place(index, at, size)
        store(old + width * at, width, load(place, width))
        store(place, width, load(value + width * at, width))
    return 0
