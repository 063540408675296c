"""What `elements` does, in numpy, where numba is absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightsync.delta.errors import Broken
from weightsync.delta.kernels.shapes import WRONG_PLACES

if TYPE_CHECKING:
    from weightsync.delta.kernels.shapes import Indices, Words

__all__ = ["find", "holds", "put"]


def find(base: Words, new: Words) -> tuple[Indices, Words]:
    """Return positions and new values of the elements that differ, of fewer than 2^31."""
    index = np.flatnonzero(base != new).astype(np.int32)
    return index, new[index]


def put(target: Words, index: Indices, value: Words) -> None:
    """Write values to elements of `target`.

    Raises:
        Broken: A position is beyond the target; the others were written.
    """
    inside = (index >= 0) & (index < len(target))
    target[index[inside]] = value[inside]
    if not inside.all():
        raise Broken(WRONG_PLACES)


def holds(target: Words, index: Indices, value: Words) -> bool:
    """Return whether elements of `target` are these values; False where one is beyond it."""
    inside = (index >= 0) & (index < len(target))
    return bool(inside.all()) and np.array_equal(target[index], value)
