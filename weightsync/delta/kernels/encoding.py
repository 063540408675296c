"""The compiled loops that make streams. Addresses in, counts out; the caller made room for all.

A tensor goes through in blocks that stay in the cache, and each block through simple passes: which
elements differ, where and by how much (`finding`), and then plane by plane.
"""

from __future__ import annotations

from typing import Any

from weightsync.delta.kernels.elementwise import load_place, mark, store
from weightsync.delta.kernels.finding import (
    BLOCK,
    GROUP,
    MASKS,
    PLACES,
    RANKS,
    VALUES,
    find,
    mark_tail,
)
from weightsync.delta.kernels.intrinsics import (
    count_ones,
    first_one,
    gaps_fit,
    is_large,
    is_negative,
    is_wide,
    load8,
    load16,
    load64,
    pack_magnitudes,
    shuffle_magnitudes,
    store8,
    store16,
    store64,
)
from weightsync.jit.compiling import inner, kernel
from weightsync.jit.processor import PACKS, SHUFFLES, vectors

__all__ = ["count_changes", "count_entries", "encode_piece", "write_entries"]

_GAP8, _BITMAP = 2, 3
_PACKS, _SHUFFLES = vectors() == PACKS, vectors() == SHUFFLES


@inner
def _gap8(gap: Any, out: Any) -> Any:
    """Write one gap of any length; return the entries that it took."""
    entries = 1
    while gap >= 255:
        store8(out, 255)
        out += 1
        gap -= 255
        entries += 1
    store8(out, gap)
    return entries


@inner
def _gaps8(places: Any, count: Any, distance: Any, out: Any) -> Any:
    """Write gaps between places; `distance` lies before the first. Return the entries."""
    entries = _gap8(distance + load16(places), out)
    at = 1
    while at + 32 <= count:
        if gaps_fit(places + 2 * at - 2, out + entries):
            entries += 32
        else:
            for each in range(at, at + 32):
                gap = load16(places + 2 * each) - load16(places + 2 * each - 2) - 1
                entries += _gap8(gap, out + entries)
        at += 32
    for each in range(at, count):
        gap = load16(places + 2 * each) - load16(places + 2 * each - 2) - 1
        entries += _gap8(gap, out + entries)
    return entries


@inner
def _gaps16(places: Any, count: Any, distance: Any, low: Any, high: Any) -> Any:
    """Write gaps as two planes; only the first can be so long that it needs skips."""
    gap, entries = distance + load16(places), 0
    while gap >= 65535:
        store8(low + entries, 255)
        store8(high + entries, 255)
        gap -= 65535
        entries += 1
    for at in range(count):
        if at:
            gap = load16(places + 2 * at) - load16(places + 2 * at - 2) - 1
        store8(low + entries, gap)
        store8(high + entries, gap >> 8)
        entries += 1
    return entries


@inner
def _copy_bits(masks: Any, elements: Any, out: Any) -> Any:
    for at in range(elements // GROUP):
        store64(out + 8 * at, load64(masks + 8 * at))
    for at in range(elements // GROUP * 8, (elements + 7) // 8):
        store8(out + at, load8(masks + at))


@inner
def _wide(values: Any, at: Any, low: Any, high: Any) -> Any:
    value = load16(values + 2 * at)
    magnitude = value if value <= 32768 else 65536 - value
    store8(low, magnitude)
    store8(high, magnitude >> 8)


@inner
def _all_wide(values: Any, wide: Any, low: Any, high: Any) -> Any:
    """Write what is wide of 64 differences; return how many are in all."""
    mask = is_wide(values)
    while mask:
        _wide(values, first_one(mask), low + wide, high + wide)
        wide += 1
        mask &= mask - 1
    return wide


@inner
def _magnitudes(values: Any, mask: Any, large: Any, wide: Any, planes: Any, scratch: Any) -> Any:
    """Write magnitudes of 64 differences that are large; return how many are wide in all."""
    out = load64(planes + 32) + large
    low, high = load64(planes + 40), load64(planes + 48)
    if _PACKS:
        pack_magnitudes(values, out)
        return _all_wide(values, wide, low, high)
    if _SHUFFLES and count_ones(mask) > 5:
        for at in range(8):
            byte = mask >> (8 * at) & 255
            shuffle_magnitudes(values + 16 * at, byte, scratch + RANKS, out)
            out += count_ones(byte)
        return _all_wide(values, wide, low, high)
    while mask:
        at = first_one(mask)
        value = load16(values + 2 * at)
        magnitude = value if value <= 32768 else 65536 - value
        if magnitude <= 256:
            store8(out, magnitude - 2)
        else:
            store8(out, 255)
            _wide(values, at, low + wide, high + wide)
            wide += 1
        out += 1
        mask &= mask - 1
    return wide


@inner
def _signed(values: Any, count: Any, planes: Any, state: Any, scratch: Any) -> Any:
    """Write whole groups of differences; return how many differences that were."""
    done, large, wide = load64(state + 16), load64(state + 32), load64(state + 40)
    signs, larges = load64(planes + 16), load64(planes + 24)
    for at in range(0, count - GROUP + 1, GROUP):
        group = values + 2 * at
        store64(signs + (done + at) // 8, is_negative(group))
        mask = is_large(group)
        store64(larges + (done + at) // 8, mask)
        wide = _magnitudes(group, mask, large, wide, planes, scratch)
        large += count_ones(mask)
    flushed = count // GROUP * GROUP
    store64(state + 16, done + flushed)
    store64(state + 32, large)
    store64(state + 40, wide)
    return flushed


@inner
def _planar(values: Any, count: Any, width: Any, planes: Any, state: Any) -> Any:
    done = load64(state + 16)
    for plane in range(width):
        out = load64(planes + 16 + 8 * plane) + done
        for at in range(count):
            store8(out + at, load8(values + width * at + plane))
    store64(state + 16, done + count)


@inner
def _positions(
    where: Any, begin: Any, elements: Any, count: Any, planes: Any, state: Any, scratch: Any
) -> Any:
    """Write the positions of a block that begins at element `begin` of the piece's bitmap."""
    distance, entries = load64(state), load64(state + 8)
    places = scratch + PLACES
    if where == _BITMAP:
        _copy_bits(scratch + MASKS, elements, load64(planes) + begin // 8)
        return
    if not count:
        store64(state, distance + elements)
        return
    if where == _GAP8:
        entries += _gaps8(places, count, distance, load64(planes) + entries)
    else:
        low, high = load64(planes) + entries, load64(planes + 8) + entries
        entries += _gaps16(places, count, distance, low, high)
    store64(state, elements - 1 - load16(places + 2 * count - 2))
    store64(state + 8, entries)


@inner
def _finish(values: Any, pending: Any, planes: Any, state: Any, scratch: Any) -> Any:
    """Write the last differences, fewer than 64, with ones behind them."""
    for at in range(pending, GROUP):
        store16(values + 2 * at, 1)
    done = load64(state + 16)
    _signed(values, GROUP, planes, state, scratch)
    store64(state + 16, done + pending)


@kernel
def encode_piece(
    base: Any,
    new: Any,
    begin: Any,
    elements: Any,
    width: Any,
    where: Any,
    relative: Any,
    last: Any,
    planes: Any,
    state: Any,
    scratch: Any,
) -> Any:
    """Append what differs in a piece of a tensor to its planes.

    Args:
        base: Address of the piece before.
        new: Address of the piece after.
        begin: Its first element in the tensor; a multiple of 64.
        elements: Elements of the piece; a multiple of 64 unless it is the last.
        width: Bytes per element.
        where: Code point of the positions.
        relative: 1 for SM, 0 for ABS.
        last: 1 for the last piece.
        planes: Address of the planes' addresses: two of positions, then those of values.
        state: Address of: elements since the last change, entries, values written, values pending,
            large ones, wide ones, changes in the block before.
        scratch: Address of what `make_scratch` made, with what the piece before left in it.
    """
    values = scratch + VALUES
    for at in range(0, elements, BLOCK):
        block = min(BLOCK, elements - at)
        pending = load64(state + 24)
        size = 2 if relative else width
        found = find(
            base + at * width,
            new + at * width,
            block,
            width,
            relative,
            load64(state + 48),
            scratch,
            values + size * pending,
        )
        store64(state + 48, found)
        _positions(where, begin + at, block, found, planes, state, scratch)
        if relative:
            flushed = _signed(values, pending + found, planes, state, scratch)
            pending += found - flushed
            for each in range(pending):
                store16(values + 2 * each, load16(values + 2 * (flushed + each)))
            store64(state + 24, pending)
        else:
            _planar(values, found, width, planes, state)
    if last and relative and load64(state + 24):
        _finish(values, load64(state + 24), planes, state, scratch)
    return 0


@kernel
def count_changes(
    base: Any, new: Any, elements: Any, width: Any, run: Any, stride: Any, scratch: Any
) -> Any:
    """Return how many elements differ in runs that begin every `stride` elements.

    Args:
        base: Address of the tensor before.
        new: Address of the tensor after.
        elements: Elements of the tensor.
        width: Bytes per element.
        run: Elements of a run, at most BLOCK; the last may be shorter.
        stride: Elements from one beginning to the next.
        scratch: Address of what `make_scratch` made.
    """
    count = 0
    for at in range(0, elements, stride):
        block = min(run, elements - at)
        words, left = block // GROUP, block % GROUP
        here, there = base + at * width, new + at * width
        mark(here, there, words, width, scratch + MASKS)
        for word in range(words):
            count += count_ones(load64(scratch + MASKS + 8 * word))
        if left:
            end = GROUP * words * width
            count += count_ones(mark_tail(here + end, there + end, left, width, scratch))
    return count


@kernel
def count_entries(index: Any, size: Any, changed: Any, skip: Any) -> Any:
    """Return how many gap entries positions take that only rise."""
    found, expected = changed, 0
    for at in range(changed):
        place = load_place(index, at, size)
        if place - expected >= skip:
            found += (place - expected) // skip
        expected = place + 1
    return found


@kernel
def write_entries(index: Any, size: Any, changed: Any, skip: Any, out: Any, width: Any) -> Any:
    """Write them, as many as `count_entries` tells."""
    expected = 0
    for at in range(changed):
        place = load_place(index, at, size)
        gap = place - expected
        expected = place + 1
        while gap >= skip:
            store(out, width, skip)
            out += width
            gap -= skip
        store(out, width, gap)
        out += width
    return 0
