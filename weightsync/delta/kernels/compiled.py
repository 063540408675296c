"""The kernels compiled by numba: the same interface as `plain`, without the GIL."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from weightsync.delta.coding import SKIP, Coding, Counts, Positions, Values
from weightsync.delta.errors import Broken
from weightsync.delta.kernels import decoding, encoding, finding
from weightsync.delta.kernels.shapes import (
    WRONG_BITMAP,
    WRONG_GAPS,
    WRONG_PLACES,
    WRONG_SM,
    Coded,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.delta.kernels.shapes import Bytes, Indices, Words

__all__ = [
    "add",
    "count",
    "decode_bitmap",
    "decode_gaps",
    "decode_sm",
    "encode",
    "entries",
    "join",
    "scatter",
    "shift",
]

#: Elements of one call: the room for all that it may write is made before.
_PIECE = 1 << 22
#: Planes: two of positions, eight of values.
_PLANES = 10
#: Whole vectors are written behind the end.
_SLACK = 64


def _address(data: Words) -> int:
    found: int = data.__array_interface__["data"][0]
    return found


class _Arena(threading.local):
    """Memory of one thread for the tensor that it encodes, used again for the next."""

    def __init__(self) -> None:
        self.planes = [np.empty(0, np.uint8) for _ in range(_PLANES)]
        self.addresses = np.zeros(_PLANES, np.int64)
        self.state = np.zeros(7, np.int64)
        self.scratch = finding.make_scratch()

    def room(self, plane: int, used: int, more: int) -> None:
        """Let `more` bytes follow the `used` ones of a plane."""
        held = self.planes[plane]
        if len(held) < used + more:
            grown = np.empty(max(used + more, 2 * len(held)), np.uint8)
            grown[:used] = held[:used]
            self.planes[plane] = grown
            self.addresses[plane] = _address(grown)


_arena = _Arena()


def _make_room(arena: _Arena, coding: Coding, width: int, begin: int, elements: int) -> None:
    """Make room for all that a piece can write."""
    distance, entries, done, pending, large, wide, _ = arena.state.tolist()
    if coding.positions is Positions.BITMAP:
        arena.room(0, begin // 8, elements // 8 + _SLACK)
    else:
        more = elements + (distance + elements) // SKIP[coding.positions] + _SLACK
        for plane in range(2 if coding.positions is Positions.GAP16 else 1):
            arena.room(plane, entries, more)
    sizes: tuple[tuple[int, int], ...] = ((done, elements + _SLACK),) * width
    if coding.values is Values.SM:
        bits = (pending + elements) // 8 + _SLACK
        bytes_ = pending + elements + _SLACK
        sizes = ((done // 8, bits),) * 2 + ((large, bytes_), (wide, bytes_), (wide, bytes_))
    for at, (used, more) in enumerate(sizes):
        arena.room(2 + at, used, more)


def count(base: Bytes, new: Bytes, width: int, run: int, stride: int) -> int:
    """Return how many elements differ in runs that begin every `stride` elements."""
    facts = len(new) // width, width, run, stride, _address(_arena.scratch)
    found: int = encoding.count_changes(_address(base), _address(new), *facts)
    return found


def encode(base: Bytes, new: Bytes, width: int, coding: Coding) -> Coded:
    """Return the planes of all elements that differ; see `plain.encode`.

    The planes are this thread's memory and last until its next call.
    """
    arena = _arena
    arena.state[:] = 0
    elements = len(new) // width
    relative = int(coding.values is Values.SM)
    fixed = [_address(each) for each in (arena.addresses, arena.state, arena.scratch)]
    before, after = _address(base), _address(new)
    for begin in range(0, elements, _PIECE):
        size = min(_PIECE, elements - begin)
        _make_room(arena, coding, width, begin, size)
        encoding.encode_piece(
            before + begin * width,
            after + begin * width,
            begin,
            size,
            width,
            int(coding.positions),
            relative,
            int(begin + size == elements),
            *fixed,
        )
    return _coded(arena, coding, width, elements)


def _coded(arena: _Arena, coding: Coding, width: int, elements: int) -> Coded:
    _, entries, changed, _, large, wide, _ = arena.state.tolist()
    first = {
        Positions.GAP16: (entries, entries),
        Positions.GAP8: (entries,),
        Positions.BITMAP: (-(-elements // 8),),
    }[coding.positions]
    bits = -(-changed // 8)
    second = (bits, bits, large, wide, wide) if coding.values is Values.SM else (changed,) * width
    skips = entries - changed if coding.positions is not Positions.BITMAP else 0
    return Coded(
        Counts(changed, skips, large, wide),
        [arena.planes[at][:size] for at, size in enumerate(first)],
        [arena.planes[2 + at][:size] for at, size in enumerate(second)],
    )


def entries(index: Indices, skip: int) -> Words:
    """Return the gap entries of ascending positions, of one byte or two; see `plain.entries`."""
    index = np.ascontiguousarray(index, np.int32 if index.dtype == np.int32 else np.int64)
    facts = _address(index), index.itemsize, len(index), skip
    found: Words = np.empty(encoding.count_entries(*facts), "u1" if skip <= 0xFF else "<u2")
    encoding.write_entries(*facts, _address(found), found.itemsize)
    return found


def decode_gaps(planes: Sequence[Bytes], elements: int, out: Indices) -> None:
    """Fill `out` with the positions that gap entries mark; see `plain.decode_gaps`.

    Raises:
        Broken: The entries mark another number of elements, or one beyond the end.
    """
    low, high = _address(planes[0]), _address(planes[1]) if len(planes) == 2 else 0
    entries = len(planes[0])
    if decoding.read_gaps(low, high, entries, elements, _address(out), out.itemsize, len(out)):
        raise Broken(WRONG_GAPS)


def decode_bitmap(plane: Bytes, elements: int, out: Indices) -> None:
    """Fill `out` with the positions of the bits that are set.

    Raises:
        Broken: Another number of bits is set, or one beyond the last element.
    """
    if decoding.read_bitmap(_address(plane), elements, _address(out), out.itemsize, len(out)):
        raise Broken(WRONG_BITMAP)


def decode_sm(planes: Sequence[Bytes], out: Words) -> None:
    """Fill `out` with differences of the bits, modulo 2^16; see `plain.decode_sm`.

    Raises:
        Broken: The planes contradict each other.
    """
    addresses = [_address(plane) for plane in planes]
    sizes = len(planes[2]), len(planes[3])
    if decoding.read_signed(*addresses, len(out), *sizes, _address(out)):
        raise Broken(WRONG_SM)


def join(planes: Sequence[Bytes], out: Words) -> None:
    """Fill `out` with words of which each plane holds one byte, low bytes first."""
    table = np.array([_address(plane) for plane in planes], np.int64)
    decoding.join_planes(_address(table), len(planes), len(out), _address(out))


def add(base: Bytes, index: Indices, delta: Words) -> None:
    """Turn differences from the base's elements into the new elements, modulo 2^16."""
    decoding.add_changes(
        _address(base), _address(index), index.itemsize, len(index), _address(delta)
    )


def shift(target: Bytes, index: Indices, delta: Words, old: Words) -> None:
    """Add differences to elements of `target`; `delta` becomes the new ones, `old` those before."""
    place = _address(target), _address(index), index.itemsize, len(index)
    decoding.shift_values(*place, _address(delta), _address(old))


def scatter(target: Bytes, index: Indices, value: Words, old: Words) -> None:
    """Write values to elements of `target`, and what was there into `old`.

    Raises:
        Broken: A position is beyond the target; nothing was written.
    """
    width = value.itemsize
    elements = len(target) // width
    place = _address(target), elements, _address(index), index.itemsize, len(index)
    if decoding.scatter_values(*place, width, _address(value), _address(old)):
        raise Broken(WRONG_PLACES)
