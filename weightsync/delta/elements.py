"""Single elements of tensors that are in memory: which ones differ, writing them, looking at them.

Everything is an array of integers as wide as an element, in one row. The GIL is released where
numba is installed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from weightsync.delta.kernels.shapes import Indices, Words

__all__ = ["differing", "holds", "put", "warm_up"]


@cache
def _kernels() -> ModuleType:
    try:
        import numba
    except ImportError:
        compiles = False
    else:
        compiles = not numba.config.DISABLE_JIT
    if compiles:
        from weightsync.delta.kernels import elements

        return elements
    from weightsync.delta.kernels import plain_elements

    return plain_elements


def warm_up() -> None:
    """Have the kernels of this module ready: the first time on a machine they are compiled."""
    _kernels()


def differing(base: Words, new: Words) -> tuple[Indices, Words]:
    """Return the ascending int32 positions of the elements that differ, and their new values.

    Takes room for all of them while it looks, so give it a piece of a large tensor at a time.

    Args:
        base: Fewer than 2^31 elements.
        new: As many, of the same width.
    """
    found: tuple[Indices, Words] = _kernels().find(base, new)
    return found


def put(target: Words, index: Indices, value: Words) -> None:
    """Write values to elements.

    Args:
        target: What is written to.
        index: Where, each position once; int32 or int64.
        value: What.

    Raises:
        Broken: A position is beyond the target; the others were written.
    """
    _kernels().put(target, index, value)


def holds(target: Words, index: Indices, value: Words) -> bool:
    """Return whether elements are these values; False where a position is beyond the target."""
    same: bool = _kernels().holds(target, index, value)
    return same
