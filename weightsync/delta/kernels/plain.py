"""The kernels in NumPy: the same streams as those in C, bit for bit, where there is no library.

Everything goes in pieces, so that temporary memory is a few megabytes besides what is returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from weightsync.delta.coding import (
    SKIP,
    WRONG_BITMAP,
    WRONG_GAPS,
    WRONG_PLACES,
    WRONG_SM,
    Broken,
    Bytes,
    Coded,
    Coding,
    Counts,
    Indices,
    Positions,
    Values,
    Words,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "add",
    "copy_rows",
    "count",
    "decode_bitmap",
    "decode_gaps",
    "decode_sm",
    "encode",
    "entries",
    "find",
    "holds",
    "join",
    "put",
    "scatter",
    "shift",
]

#: Elements, entries or changes at a time; a multiple of 8.
_PIECE = 1 << 18


def _words(data: Bytes, width: int) -> Words:
    return data.view(f"<u{width}")


def _pieces(size: int) -> Iterator[slice]:
    return (slice(at, min(at + _PIECE, size)) for at in range(0, size, _PIECE))


def copy_rows(table: Words) -> None:
    """Copy rows of memory; nothing is checked.

    `table` is int64 and has of each copy the addresses of target and source, the number of rows,
    the bytes of one, and those from one to the next on both sides.
    """
    for target, source, rows, size, to, of in table.tolist():
        for row in range(rows):
            ctypes.memmove(target + row * to, source + row * of, size)


def count(base: Bytes, new: Bytes, width: int, run: int, stride: int) -> int:
    """Return how many elements differ in runs that begin every `stride` elements."""
    before, after = _words(base, width), _words(new, width)
    runs = (slice(at, at + run) for at in range(0, len(before), stride))
    return sum(int(np.count_nonzero(before[at] != after[at])) for at in runs)


def _entries(where: NDArray[np.int64], last: int, skip: int) -> NDArray[np.int64]:
    """Return the gap entries of ascending positions after `last`."""
    skips, rest = np.divmod(np.diff(where, prepend=last) - 1, skip)
    found = np.full(len(where) + int(skips.sum()), skip, np.int64)
    found[np.cumsum(skips + 1) - 1] = rest
    return found


def entries(index: Indices, skip: int) -> Words:
    """Return the gap entries, of one byte or two, of strictly increasing positions.

    `skip` is the `SKIP` of their coding.
    """
    kind = "u1" if skip <= 0xFF else "<u2"
    found: list[Words] = []
    last = -1
    for piece in _pieces(len(index)):
        where = index[piece].astype(np.int64)
        found.append(_entries(where, last, skip).astype(kind))
        last = int(where[-1])
    joined: Words = _joined(found, kind)
    return joined


def _planar(words: Words) -> list[Bytes]:
    """Return the bytes of each word, one plane per byte, low bytes first."""
    columns = words.view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(columns[:, at]) for at in range(words.itemsize)]


def _sm(delta: Words) -> tuple[list[Bytes], int, int]:
    """Return the planes of differences and how many are large and wide."""
    signed = delta.view(np.int16)
    magnitude = np.abs(signed.astype(np.int32))
    large = magnitude != 1
    beyond = magnitude[large]
    wide = beyond > 256
    planes = [
        np.packbits(signed < 0, bitorder="little"),
        np.packbits(large, bitorder="little"),
        np.where(wide, 255, beyond - 2).astype(np.uint8),
        *_planar(beyond[wide].astype("<u2")),
    ]
    return planes, len(beyond), int(np.count_nonzero(wide))


def _joined(parts: list[Any], dtype: str) -> Any:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def encode(base: Bytes, new: Bytes, width: int, coding: Coding) -> Coded:
    """Return the planes of all elements that differ, of `width` bytes each.

    `coding` is not dense; `new` is as long as `base`.
    """
    before, after = _words(base, width), _words(new, width)
    skip = SKIP.get(coding.positions)
    places: list[Any] = []
    found: list[Words] = []
    last, changed = -1, 0
    for piece in _pieces(len(before)):
        differs = before[piece] != after[piece]
        where = np.flatnonzero(differs)
        if coding.positions is Positions.BITMAP:
            places.append(np.packbits(differs, bitorder="little"))
        if not len(where):
            continue
        where += piece.start
        if skip:
            kind = np.uint8 if coding.positions is Positions.GAP8 else "<u2"
            places.append(_entries(where, last, skip).astype(kind))
        found.append(after[where] - before[where] if coding.values is Values.SM else after[where])
        last, changed = int(where[-1]), changed + len(where)
    position = _joined(places, "<u2" if coding.positions is Positions.GAP16 else "u1")
    value = _joined(found, f"<u{width}")
    skips = len(position) - changed if skip else 0
    if coding.values is Values.SM:
        planes, large, wide = _sm(value)
        return Coded(Counts(changed, skips, large, wide), _planar(position), planes)
    return Coded(Counts(changed, skips), _planar(position), _planar(value))


def decode_gaps(planes: Sequence[Bytes], elements: int, out: Indices) -> None:
    """Fill `out`, which has room for each change, with the positions that gap entries mark.

    `planes` is one plane, or the low and the high bytes. Raises Broken when they mark another
    number of elements, or one beyond the end.
    """
    skip = (1 << 8 * len(planes)) - 1
    position, filled = -1, 0
    for piece in _pieces(len(planes[0])):
        entries = planes[0][piece].astype(np.int64)
        if len(planes) == 2:
            entries |= planes[1][piece].astype(np.int64) << 8
        marks = entries != skip
        reached = np.cumsum(entries + marks) + position
        position = int(reached[-1])
        reached = reached[marks]
        if position >= elements or filled + len(reached) > len(out):
            raise Broken(WRONG_GAPS)
        out[filled : filled + len(reached)] = reached
        filled += len(reached)
    if filled != len(out) or not marks[-1]:
        raise Broken(WRONG_GAPS)


def decode_bitmap(plane: Bytes, elements: int, out: Indices) -> None:
    """Fill `out` with the positions of the bits that are set.

    Raises Broken when their number differs, or one is beyond the last element.
    """
    filled = 0
    for piece in _pieces(len(plane)):
        where = np.flatnonzero(np.unpackbits(plane[piece], bitorder="little"))
        if filled + len(where) > len(out):
            raise Broken(WRONG_BITMAP)
        out[filled : filled + len(where)] = where + 8 * piece.start
        filled += len(where)
    if filled != len(out) or (filled and out[-1] >= elements):
        raise Broken(WRONG_BITMAP)


def decode_sm(planes: Sequence[Bytes], out: Words) -> None:
    """Fill `out`, which has room for each change, with differences of the bits, modulo 2^16.

    The planes are signs, which are large, magnitudes of these less 2, and the wide ones' low and
    high bytes. Raises Broken when they contradict each other.
    """
    bits = [np.unpackbits(plane, bitorder="little") for plane in planes[:2]]
    if any(plane[len(out) :].any() for plane in bits):
        raise Broken(WRONG_SM)
    negative, large = (plane[: len(out)].astype(bool) for plane in bits)
    if np.count_nonzero(large) != len(planes[2]):
        raise Broken(WRONG_SM)
    beyond = planes[2].astype(np.uint16) + np.uint16(2)
    wide = planes[2] == 255
    if np.count_nonzero(wide) != len(planes[3]):
        raise Broken(WRONG_SM)
    magnitude = planes[3].astype(np.uint16) | planes[4].astype(np.uint16) << np.uint16(8)
    if len(magnitude) and (magnitude.min() <= 256 or magnitude.max() > 1 << 15):
        raise Broken(WRONG_SM)
    beyond[wide] = magnitude
    out[:] = 1
    out[large] = beyond
    np.negative(out, out=out, where=negative)


def join(planes: Sequence[Bytes], out: Words) -> None:
    """Fill `out` with words of which each plane holds one byte, low bytes first."""
    columns = out.view(np.uint8).reshape(-1, out.itemsize)
    for at, plane in enumerate(planes):
        columns[:, at] = plane


def add(base: Bytes, index: Indices, delta: Words) -> None:
    """Turn differences from the base's elements into the new elements, modulo 2^16."""
    words = _words(base, delta.itemsize)
    for piece in _pieces(len(index)):
        delta[piece] += words[index[piece]]


def shift(target: Bytes, index: Indices, delta: Words, old: Words) -> None:
    """Add differences to elements of `target`; `delta` becomes the new ones, `old` those before."""
    words = _words(target, delta.itemsize)
    for piece in _pieces(len(index)):
        old[piece] = words[index[piece]]
        delta[piece] += old[piece]
        words[index[piece]] = delta[piece]


def scatter(target: Bytes, index: Indices, value: Words, old: Words) -> None:
    """Write values to elements of `target`, and what was there into `old`.

    Raises Broken when an index is beyond `target`; nothing was written.
    """
    words = _words(target, value.itemsize)
    if len(index) and not 0 <= index.min() <= index.max() < len(words):
        raise Broken(WRONG_PLACES)
    for piece in _pieces(len(index)):
        old[piece] = words[index[piece]]
        words[index[piece]] = value[piece]


def find(base: Words, new: Words) -> tuple[Indices, Words]:
    """Return the ascending int32 positions of the elements that differ, and their new values.

    Takes room for all of them while it looks, so give it a piece of a large tensor at a time.
    Both are fewer than 2^31 elements, as integers as wide as an element, in one row.
    """
    index = np.flatnonzero(base != new).astype(np.int32)
    return index, new[index]


def put(target: Words, index: Indices, value: Words) -> None:
    """Write values to elements of `target`, each position of `index` (int32 or int64) once.

    Raises Broken when one is beyond the target; the others were written.
    """
    inside = (index >= 0) & (index < len(target))
    target[index[inside]] = value[inside]
    if not inside.all():
        raise Broken(WRONG_PLACES)


def holds(target: Words, index: Indices, value: Words) -> bool:
    """Return whether elements of `target` are these values; False where one is beyond it."""
    inside = (index >= 0) & (index < len(target))
    return bool(inside.all()) and np.array_equal(target[index], value)
