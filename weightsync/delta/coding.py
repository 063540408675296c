"""Codings of one tensor's changes, and the sizes of their planes, which follow from counts alone.

`docs/delta-format.md` specifies every bit.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from weightsync.delta.delta_errors import invalid
from weightsync.model.dtypes import DTYPE_BITS

__all__ = [
    "SKIP",
    "Coding",
    "Counts",
    "Positions",
    "Values",
    "check_counts",
    "element_width",
    "plane_sizes",
    "total_bytes",
]


class Positions(enum.IntEnum):
    """How the positions of changed elements are written. Code point 4 is kept free."""

    #: None are: the values are all of the tensor.
    NONE = 0
    #: Gaps in 16 bits, as a plane of low and one of high bytes.
    GAP16 = 1
    #: Gaps in 8 bits.
    GAP8 = 2
    #: One bit per element.
    BITMAP = 3


class Values(enum.IntEnum):
    """How the values of changed elements are written."""

    #: All bytes of the tensor.
    DENSE = 0
    #: New values, one plane per byte of the element.
    ABS = 1
    #: Sign and magnitude of the difference of the bits; two-byte elements only.
    SM = 2


#: A gap entry of this value moves on by so many elements and marks none.
SKIP = {Positions.GAP8: 0xFF, Positions.GAP16: 0xFFFF}


@dataclass(frozen=True, slots=True)
class Counts:
    """What the sizes of all planes follow from.

    Attributes:
        changed: Elements that differ.
        skips: Gap entries that mark no element.
        large: SM: differences other than +1 and -1.
        wide: SM: differences beyond 256 in magnitude.
    """

    changed: int
    skips: int = 0
    large: int = 0
    wide: int = 0


@dataclass(frozen=True, slots=True)
class Coding:
    """How one tensor is coded."""

    positions: Positions
    values: Values

    def __str__(self) -> str:
        if self.values is Values.DENSE:
            return "dense"
        return f"{self.positions.name}+{self.values.name}".lower()


def element_width(dtype: str) -> int:
    """Return the bytes of what counts as one element; that of dtypes below a byte is the byte."""
    return max(DTYPE_BITS[dtype], 8) // 8


def total_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor whose dtype and shape were checked."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def check_counts(coding: Coding, width: int, elements: int, counts: Counts) -> None:
    """Prove that such a tensor can have these counts.

    Args:
        coding: Its coding.
        width: Bytes per element.
        elements: Elements of the tensor.
        counts: What was declared.

    Raises:
        DeltaError: SHARD_INVALID.
    """
    if (coding.positions is Positions.NONE) != (coding.values is Values.DENSE):
        raise invalid(f"positions {coding.positions.name} with values {coding.values.name}")
    if coding.values is Values.SM and width != 2:
        raise invalid(f"SM values of elements of {width} bytes, where only 2 are possible")
    most_skips = (elements - counts.changed) // SKIP.get(coding.positions, elements + 1)
    good = (
        1 <= counts.changed <= elements
        and counts.skips <= most_skips
        and counts.wide <= counts.large <= counts.changed
        and (coding.values is not Values.DENSE or counts.changed == elements)
    )
    if not good:
        raise invalid(
            f"{counts.changed} changes, {counts.skips} skips, {counts.large} large and "
            f"{counts.wide} wide differences in {elements} elements, which is impossible"
        )


def plane_sizes(
    coding: Coding, width: int, elements: int, counts: Counts
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes in bytes of the planes of positions and of values."""
    entries, bits = counts.changed + counts.skips, -(-counts.changed // 8)
    positions = {
        Positions.NONE: (),
        Positions.GAP16: (entries, entries),
        Positions.GAP8: (entries,),
        Positions.BITMAP: (-(-elements // 8),),
    }[coding.positions]
    values = {
        Values.DENSE: (elements * width,),
        Values.ABS: (counts.changed,) * width,
        Values.SM: (bits, bits, counts.large, counts.wide, counts.wide),
    }[coding.values]
    return positions, values
