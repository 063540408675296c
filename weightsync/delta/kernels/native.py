"""The kernels in C: the same interface as `plain`, without the GIL, at one level of processors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

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
    plane_sizes,
)

#: Compiled from the C beside it when the package is built; absent where there was no compiler.
LIBRARY = Path(__file__).with_name("kernels.so")
#: From what every processor can to what few can.
_LEVELS = ("generic", "avx2", "avx512")
#: Arguments of each function: addresses and numbers, each of 64 bits.
_ARGUMENTS = {
    "add_changes": 5,
    "compare_elements": 7,
    "copy_piece": 6,
    "copy_rows": 2,
    "count_changes": 7,
    "encode_piece": 11,
    "find_elements": 6,
    "finish_digest": 3,
    "join_planes": 4,
    "put_elements": 7,
    "read_bitmap": 5,
    "read_gaps": 7,
    "read_signed": 9,
    "scatter_values": 8,
    "shift_values": 6,
    "write_entries": 5,
}
#: Those that the level generic lacks: two passes are faster there.
_COPY = frozenset({"copy_piece", "finish_digest"})
#: Elements of one call: the room for all that it may write is made before.
_PIECE = 1 << 22
#: Planes: two of positions, eight of values.
_PLANES = 10
#: Whole vectors are written behind the end.
_SLACK = 64


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(LIBRARY))


def levels() -> tuple[str, ...]:
    """Return the levels that this processor has, the best one last.

    Raises OSError when there is no library, or it is for other machines.
    """
    return _LEVELS[: _library().best_level() + 1]


def digest_bytes() -> int:
    """Return the bytes of a text's digest under way; 0 where no level has the copy."""
    return int(_library().digest_bytes())


@cache
def function(name: str, level: str) -> Any:
    """Return a function of integers; it releases the GIL. AttributeError: that level has none."""
    found = getattr(_library(), f"{name}_{level}")
    found.argtypes, found.restype = [ctypes.c_int64] * _ARGUMENTS[name], ctypes.c_int64
    return found


def address(data: Words) -> int:
    found: int = data.__array_interface__["data"][0]
    return found


class _Arena(threading.local):
    """Memory of one thread for the tensor that it encodes, used again for the next."""

    def __init__(self) -> None:
        self.planes = [np.empty(0, np.uint8) for _ in range(_PLANES)]
        self.addresses = np.zeros(_PLANES, np.int64)
        #: As `State` in encoding.h.
        self.state = np.zeros(7, np.int64)
        self.scratch = np.zeros(_library().scratch_bytes(), np.uint8)
        #: What every call of the encoder is given.
        self.fixed = tuple(address(each) for each in (self.addresses, self.state, self.scratch))

    def room(self, plane: int, used: int, more: int) -> None:
        """Let `more` bytes follow the `used` ones of a plane."""
        memory = self.planes[plane]
        if len(memory) < used + more:
            grown = np.empty(max(used + more, 2 * len(memory)), np.uint8)
            grown[:used] = memory[:used]
            self.planes[plane] = grown
            self.addresses[plane] = address(grown)


def _make_room(arena: _Arena, coding: Coding, width: int, begin: int, elements: int) -> None:
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


def _coded(arena: _Arena, coding: Coding, width: int, elements: int) -> Coded:
    _, entries, changed, _, large, wide, _ = arena.state.tolist()
    skips = entries - changed if coding.positions is not Positions.BITMAP else 0
    counts = Counts(changed, skips, large, wide)
    positions, values = plane_sizes(coding, width, elements, counts)
    return Coded(
        counts,
        [arena.planes[at][:size] for at, size in enumerate(positions)],
        [arena.planes[2 + at][:size] for at, size in enumerate(values)],
    )


class NativeKernels:
    """The kernels of one of `levels`; see `plain` for what each does."""

    def __init__(self, level: str) -> None:
        self.level = level
        self._arena = _Arena()
        self._call = {name: function(name, level) for name in _ARGUMENTS if name not in _COPY}

    def count(self, base: Bytes, new: Bytes, width: int, run: int, stride: int) -> int:
        facts = len(new) // width, width, run, stride, self._arena.fixed[2]
        found: int = self._call["count_changes"](address(base), address(new), *facts)
        return found

    def encode(self, base: Bytes, new: Bytes, width: int, coding: Coding) -> Coded:
        """As `plain`; the planes are this thread's memory and last until its next call."""
        arena, call = self._arena, self._call["encode_piece"]
        arena.state[:] = 0
        elements = len(new) // width
        how = width, int(coding.positions), int(coding.values is Values.SM)
        before, after = address(base), address(new)
        for begin in range(0, elements, _PIECE):
            size = min(_PIECE, elements - begin)
            _make_room(arena, coding, width, begin, size)
            at, last = begin * width, int(begin + size == elements)
            call(before + at, after + at, begin, size, *how, last, *arena.fixed)
        return _coded(arena, coding, width, elements)

    def entries(self, index: Indices, skip: int) -> Words:
        index = np.ascontiguousarray(index, np.int32 if index.dtype == np.int32 else np.int64)
        width, write = 1 if skip <= 0xFF else 2, self._call["write_entries"]
        facts = address(index), index.itemsize, len(index), width
        found: Words = np.empty(write(*facts, 0), f"<u{width}")
        write(*facts, address(found))
        return found

    def decode_gaps(self, planes: Sequence[Bytes], elements: int, out: Indices) -> None:
        low, high = address(planes[0]), address(planes[1]) if len(planes) == 2 else 0
        room = address(out), out.itemsize, len(out)
        if self._call["read_gaps"](low, high, len(planes[0]), elements, *room):
            raise Broken(WRONG_GAPS)

    def decode_bitmap(self, plane: Bytes, elements: int, out: Indices) -> None:
        room = address(out), out.itemsize, len(out)
        if self._call["read_bitmap"](address(plane), elements, *room):
            raise Broken(WRONG_BITMAP)

    def decode_sm(self, planes: Sequence[Bytes], out: Words) -> None:
        sizes = len(out), len(planes[2]), len(planes[3])
        if self._call["read_signed"](*map(address, planes), *sizes, address(out)):
            raise Broken(WRONG_SM)

    def join(self, planes: Sequence[Bytes], out: Words) -> None:
        table = np.array([address(plane) for plane in planes], np.int64)
        self._call["join_planes"](address(table), len(planes), len(out), address(out))

    def add(self, base: Bytes, index: Indices, delta: Words) -> None:
        place = address(base), address(index), index.itemsize, len(index)
        self._call["add_changes"](*place, address(delta))

    def shift(self, target: Bytes, index: Indices, delta: Words, old: Words) -> None:
        place = address(target), address(index), index.itemsize, len(index)
        self._call["shift_values"](*place, address(delta), address(old))

    def scatter(self, target: Bytes, index: Indices, value: Words, old: Words) -> None:
        width = value.itemsize
        place = address(target), len(target) // width, address(index), index.itemsize, len(index)
        if self._call["scatter_values"](*place, width, address(value), address(old)):
            raise Broken(WRONG_PLACES)

    def find(self, base: Words, new: Words) -> tuple[Indices, Words]:
        index, value = np.empty(len(new), np.int32), np.empty(len(new), new.dtype)
        facts = len(new), new.itemsize, address(index), address(value)
        count = self._call["find_elements"](address(base), address(new), *facts)
        # Copies: the room was for all.
        return index[:count].copy(), value[:count].copy()

    def put(self, target: Words, index: Indices, value: Words) -> None:
        place = address(target), len(target), address(index), index.itemsize, len(index)
        if self._call["put_elements"](*place, value.itemsize, address(value)):
            raise Broken(WRONG_PLACES)

    def holds(self, target: Words, index: Indices, value: Words) -> bool:
        place = address(target), len(target), address(index), index.itemsize, len(index)
        return not self._call["compare_elements"](*place, value.itemsize, address(value))

    def copy_rows(self, table: Words) -> None:
        table = np.ascontiguousarray(table)
        self._call["copy_rows"](address(table), len(table))
