"""The compiled loops that make streams. Addresses in, counts out; the caller made room for all.

A tensor goes through in blocks that stay in the cache, and each block through simple passes: which
elements differ (64 at a time), where they are, by how much, and then the planes. Passes without
branches on data beat one clever loop.
"""

from __future__ import annotations

from typing import Any

from weightsync.delta.kernels.intrinsics import (
    count_ones,
    differ8,
    differ16,
    differ32,
    differ64,
    first_one,
    gaps_fit,
    is_large,
    is_negative,
    is_wide,
    load8,
    load16,
    load32,
    load64,
    pack_changes,
    pack_magnitudes,
    store8,
    store16,
    store32,
    store64,
)
from weightsync.delta.kernels.jit import inner, kernel
from weightsync.delta.kernels.processor import packs_vectors

__all__ = ["BLOCK", "SCRATCH", "count_changes", "encode_piece"]

#: Elements of one block: places in it fit into 16 bits, and two blocks of two bytes into the cache.
BLOCK = 1 << 15
_GROUP = 64
#: Scratch: masks, places, values, and two copies of the last elements. Whole vectors are written.
_MASKS = 0
_PLACES = _MASKS + BLOCK // 8 + 64
_VALUES = _PLACES + 2 * BLOCK + 256
_TAILS = _VALUES + 8 * (BLOCK + _GROUP) + 256
SCRATCH = _TAILS + 2 * 8 * _GROUP

_GAP16, _GAP8, _BITMAP = 1, 2, 3
_PACKS = packs_vectors()


@inner
def _differ(base: Any, new: Any, words: Any, width: Any, masks: Any) -> Any:
    """Write a mask for each 64 elements."""
    if width == 1:
        for at in range(words):
            store64(masks + 8 * at, differ8(base + 64 * at, new + 64 * at))
    elif width == 2:
        for at in range(words):
            store64(masks + 8 * at, differ16(base + 128 * at, new + 128 * at))
    elif width == 4:
        for at in range(words):
            store64(masks + 8 * at, differ32(base + 256 * at, new + 256 * at))
    else:
        for at in range(words):
            store64(masks + 8 * at, differ64(base + 512 * at, new + 512 * at))


@inner
def _differ_tail(base: Any, new: Any, left: Any, width: Any, scratch: Any) -> Any:
    """Return the mask of fewer than 64 elements, without a look behind them."""
    tails = scratch + _TAILS
    for at in range(0, 2 * 8 * _GROUP, 8):
        store64(tails + at, 0)
    for at in range(left * width):
        store8(tails + at, load8(base + at))
        store8(tails + 8 * _GROUP + at, load8(new + at))
    _differ(tails, tails + 8 * _GROUP, 1, width, tails)
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
def _flatten(masks: Any, words: Any, places: Any) -> Any:
    """Write the places of all bits that are set; return how many there are."""
    count = 0
    for at in range(words):
        count += _places_of(load64(masks + 8 * at), _GROUP * at, places + 2 * count)
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
            place = _GROUP * at + 32 * half
            found = pack_changes(
                base + 2 * place,
                new + 2 * place,
                place,
                scratch + _PLACES + 2 * count,
                values + 2 * count,
            )
            mask |= found << (32 * half)
            count += count_ones(found)
        store64(scratch + _MASKS + 8 * at, mask)
    return count


@inner
def _find(
    base: Any, new: Any, elements: Any, width: Any, relative: Any, scratch: Any, values: Any
) -> Any:
    """Write masks, places and values of a block; return how many elements differ."""
    words, left = elements // _GROUP, elements % _GROUP
    masks, places = scratch + _MASKS, scratch + _PLACES
    if _PACKS and relative:
        count = _pack(base, new, words, scratch, values)
    else:
        _differ(base, new, words, width, masks)
        count = _flatten(masks, words, places)
        _take(base, new, places, count, width, relative, values)
    if left:
        at = _GROUP * words * width
        mask = _differ_tail(base + at, new + at, left, width, scratch)
        store64(masks + 8 * words, mask)
        more = _places_of(mask, _GROUP * words, places + 2 * count)
        end = values + (2 if relative else width) * count
        _take(base, new, places + 2 * count, more, width, relative, end)
        count += more
    return count


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
    for at in range(elements // _GROUP):
        store64(out + 8 * at, load64(masks + 8 * at))
    for at in range(elements // _GROUP * 8, (elements + 7) // 8):
        store8(out + at, load8(masks + at))


@inner
def _wide(values: Any, at: Any, low: Any, high: Any) -> Any:
    value = load16(values + 2 * at)
    magnitude = value if value <= 32768 else 65536 - value
    store8(low, magnitude)
    store8(high, magnitude >> 8)


@inner
def _magnitudes(
    values: Any, mask: Any, large: Any, wide: Any, out: Any, low: Any, high: Any
) -> Any:
    """Write magnitudes of 64 differences that are large; return how many are wide in all."""
    if _PACKS:
        pack_magnitudes(values, out + large)
        mask = is_wide(values)
        while mask:
            _wide(values, first_one(mask), low + wide, high + wide)
            wide += 1
            mask &= mask - 1
        return wide
    while mask:
        at = first_one(mask)
        value = load16(values + 2 * at)
        magnitude = value if value <= 32768 else 65536 - value
        if magnitude <= 256:
            store8(out + large, magnitude - 2)
        else:
            store8(out + large, 255)
            _wide(values, at, low + wide, high + wide)
            wide += 1
        large += 1
        mask &= mask - 1
    return wide


@inner
def _signed(values: Any, count: Any, planes: Any, state: Any) -> Any:
    """Write whole groups of differences; return how many differences that were."""
    done, large, wide = load64(state + 16), load64(state + 32), load64(state + 40)
    signs, larges, out = load64(planes + 16), load64(planes + 24), load64(planes + 32)
    low, high = load64(planes + 40), load64(planes + 48)
    for at in range(0, count - _GROUP + 1, _GROUP):
        group = values + 2 * at
        store64(signs + (done + at) // 8, is_negative(group))
        mask = is_large(group)
        store64(larges + (done + at) // 8, mask)
        wide = _magnitudes(group, mask, large, wide, out, low, high)
        large += count_ones(mask)
    flushed = count // _GROUP * _GROUP
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
    places = scratch + _PLACES
    if where == _BITMAP:
        _copy_bits(scratch + _MASKS, elements, load64(planes) + begin // 8)
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
def _finish(values: Any, pending: Any, planes: Any, state: Any) -> Any:
    """Write the last differences, fewer than 64, with ones behind them."""
    for at in range(pending, _GROUP):
        store16(values + 2 * at, 1)
    done = load64(state + 16)
    _signed(values, _GROUP, planes, state)
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
            large ones, wide ones.
        scratch: Address of SCRATCH bytes that stay as they are between pieces of one tensor.
    """
    values = scratch + _VALUES
    for at in range(0, elements, BLOCK):
        block = min(BLOCK, elements - at)
        pending = load64(state + 24)
        size = 2 if relative else width
        found = _find(
            base + at * width,
            new + at * width,
            block,
            width,
            relative,
            scratch,
            values + size * pending,
        )
        _positions(where, begin + at, block, found, planes, state, scratch)
        if relative:
            flushed = _signed(values, pending + found, planes, state)
            pending += found - flushed
            for each in range(pending):
                store16(values + 2 * each, load16(values + 2 * (flushed + each)))
            store64(state + 24, pending)
        else:
            _planar(values, found, width, planes, state)
    if last and relative and load64(state + 24):
        _finish(values, load64(state + 24), planes, state)
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
        scratch: Address of SCRATCH bytes.
    """
    count = 0
    for at in range(0, elements, stride):
        block = min(run, elements - at)
        words, left = block // _GROUP, block % _GROUP
        here, there = base + at * width, new + at * width
        _differ(here, there, words, width, scratch + _MASKS)
        for word in range(words):
            count += count_ones(load64(scratch + _MASKS + 8 * word))
        if left:
            end = _GROUP * words * width
            count += count_ones(_differ_tail(here + end, there + end, left, width, scratch))
    return count
