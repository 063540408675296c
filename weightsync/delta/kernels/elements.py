"""The compiled loops over single elements: which ones differ, writing some, and looking at them.

The loops take addresses and give counts; whatever lies outside is told and never touched. They are
a module of their own because a rank needs no others, and compiling those takes long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from weightsync.delta.errors import Broken
from weightsync.delta.kernels.elementwise import load, load_place, mark, store
from weightsync.delta.kernels.intrinsics import (
    first_one,
    load64,
    prefetch,
    store32,
)
from weightsync.delta.kernels.shapes import WRONG_PLACES
from weightsync.jit.compiling import kernel

if TYPE_CHECKING:
    from weightsync.delta.kernels.shapes import Indices, Words

__all__ = ["find", "holds", "put"]

_GROUP = 64
#: Elements of one block: two blocks of the widest stay in the cache until their values are taken.
_BLOCK = 1 << 14
_MASKS = _BLOCK // 8
#: Elements between the one that is touched and the one whose line is fetched.
_AHEAD = 96


@kernel
def _find_elements(
    base: Any, new: Any, elements: Any, width: Any, masks: Any, index: Any, value: Any
) -> Any:
    """Write positions and new values of what differs, room for all; return how many do.

    Positions are of four bytes, so there are fewer than 2^31 elements. `masks` has `_MASKS` bytes.
    """
    count = 0
    whole = elements - elements % _GROUP
    for begin in range(0, whole, _BLOCK):
        groups = min(_BLOCK, whole - begin) // _GROUP
        mark(base + width * begin, new + width * begin, groups, width, masks)
        for at in range(groups):
            mask = load64(masks + 8 * at)
            while mask != 0:
                place = begin + _GROUP * at + first_one(mask)
                mask &= mask - 1
                store32(index + 4 * count, place)
                store(value + width * count, width, load(new + width * place, width))
                count += 1
    for place in range(whole, elements):
        after = load(new + width * place, width)
        if load(base + width * place, width) != after:
            store32(index + 4 * count, place)
            store(value + width * count, width, after)
            count += 1
    return count


@kernel
def _put_elements(
    target: Any, elements: Any, index: Any, size: Any, changed: Any, width: Any, value: Any
) -> Any:
    """Write values to a tensor; return how many positions lie outside."""
    limit = min(elements, 1 << 31) if size == 4 else elements
    wrong = 0
    for at in range(changed):
        # Any address is harmless to prefetch, so that behind the end the last one serves.
        prefetch(target + width * load_place(index, min(at + _AHEAD, changed - 1), size))
        place = load_place(index, at, size)
        if 0 <= place < limit:
            store(target + width * place, width, load(value + width * at, width))
        else:
            wrong += 1
    return wrong


@kernel
def _compare_elements(
    target: Any, elements: Any, index: Any, size: Any, changed: Any, width: Any, value: Any
) -> Any:
    """Return how many elements of a tensor are other than the values, or outside."""
    limit = min(elements, 1 << 31) if size == 4 else elements
    wrong = 0
    for at in range(changed):
        prefetch(target + width * load_place(index, min(at + _AHEAD, changed - 1), size))
        place = load_place(index, at, size)
        if 0 <= place < limit:
            there = load(target + width * place, width)
            wrong += 1 if there != load(value + width * at, width) else 0
        else:
            wrong += 1
    return wrong


def _address(data: Words) -> int:
    found: int = data.__array_interface__["data"][0]
    return found


def find(base: Words, new: Words) -> tuple[Indices, Words]:
    """Return positions and new values of the elements that differ, of fewer than 2^31."""
    index, value = np.empty(len(new), np.int32), np.empty(len(new), new.dtype)
    masks = np.empty(_MASKS, np.uint8)
    both = _address(base), _address(new), len(new), new.itemsize, _address(masks)
    count = _find_elements(*both, _address(index), _address(value))
    # Copies: the room was for all.
    return index[:count].copy(), value[:count].copy()


def put(target: Words, index: Indices, value: Words) -> None:
    """Write values to elements of `target`.

    Raises:
        Broken: A position is beyond the target; the others were written.
    """
    place = _address(target), len(target), _address(index), index.itemsize, len(index)
    if _put_elements(*place, value.itemsize, _address(value)):
        raise Broken(WRONG_PLACES)


def holds(target: Words, index: Indices, value: Words) -> bool:
    """Return whether elements of `target` are these values; False where one is beyond it."""
    place = _address(target), len(target), _address(index), index.itemsize, len(index)
    return not _compare_elements(*place, value.itemsize, _address(value))
