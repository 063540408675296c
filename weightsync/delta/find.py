"""Single elements of tensors that are in memory: which ones differ, writing them, looking at them.

Everything is an array of integers as wide as an element, in one row. Kernels in C release the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.delta.kernels import chosen

if TYPE_CHECKING:
    from weightsync.delta.kernels.shapes import Indices, Words

__all__ = ["differing", "holds", "put"]


def differing(base: Words, new: Words) -> tuple[Indices, Words]:
    """Return the ascending int32 positions of the elements that differ, and their new values.

    Takes room for all of them while it looks, so give it a piece of a large tensor at a time.

    Args:
        base: Fewer than 2^31 elements.
        new: As many, of the same width.
    """
    return chosen().find(base, new)


def put(target: Words, index: Indices, value: Words) -> None:
    """Write values to elements.

    Args:
        target: What is written to.
        index: Where, each position once; int32 or int64.
        value: What.

    Raises:
        Broken: A position is beyond the target; the others were written.
    """
    chosen().put(target, index, value)


def holds(target: Words, index: Indices, value: Words) -> bool:
    """Return whether elements are these values; False where a position is beyond the target."""
    return chosen().holds(target, index, value)
