"""Boxes: rectangular parts of tensors, as the ranks of a sharded trainer hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Box", "box_name", "problem_of"]

#: Pairs of boxes that are compared at most, and for each box besides; those of a mesh are fewer.
_COMPARED, _COMPARED_EACH = 100_000, 64


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor.

    Attributes:
        offsets: Its first element in each dimension, in elements of the whole tensor.
        sizes: Its elements in each dimension; 0 anywhere: it is empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """One past its last element in each dimension."""
        return tuple(map(sum, zip(self.offsets, self.sizes, strict=True)))

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes it in an array of the whole tensor."""
        return tuple(map(slice, self.offsets, self.ends))

    def overlaps(self, other: Box) -> bool:
        """Whether an element is in both; of as many dimensions."""
        if not self.elements or not other.elements:
            return False
        sides = zip(self.offsets, self.ends, other.offsets, other.ends, strict=True)
        return all(begin < its_end and its < end for begin, end, its, its_end in sides)

    def __str__(self) -> str:
        """Return it as an index, such as `[0:4, 8:16]`."""
        sides = zip(self.offsets, self.ends, strict=True)
        return f"[{', '.join(f'{begin}:{end}' for begin, end in sides)}]"


def box_name(tensor: str, box: Box) -> str:
    """Return the name of a box of a tensor, which no other box of a version has."""
    return f"{tensor}@{','.join(map(str, box.offsets))}"


def problem_of(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return why boxes do not cover each element of a tensor exactly once; "": they do.

    Args:
        shape: Of the whole tensor, in elements.
        boxes: In any order.
    """
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"{box} has another number of dimensions than {list(shape)}"
        if min((*box.offsets, *box.sizes), default=0) < 0 or any(
            end > size for end, size in zip(box.ends, shape, strict=True)
        ):
            return f"{box} reaches beyond {list(shape)}"
    try:
        twice = _overlap(boxes)
    except _TooManyError:
        return f"{len(boxes)} boxes lie across each other, too many to compare; join some"
    if twice is not None:
        return f"{twice[0]} and {twice[1]} overlap"
    missing = math.prod(shape) - sum(box.elements for box in boxes)
    return f"{missing} of {math.prod(shape)} elements are in none" if missing else ""


class _TooManyError(Exception):
    """Boxes that would take minutes to compare."""


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two that overlap: along the dimension that parts most of them, few are compared."""
    full = [box for box in boxes if box.elements]
    if len(full) < 2:
        return None
    if not full[0].sizes:
        return full[0], full[1]
    along = max(range(len(full[0].sizes)), key=lambda d: len({box.offsets[d] for box in full}))
    reaching: list[Box] = []
    left = _COMPARED + _COMPARED_EACH * len(full)
    for box in sorted(full, key=lambda box: box.offsets[along]):
        left -= len(reaching)
        if left < 0:
            raise _TooManyError
        reaching = [other for other in reaching if other.ends[along] > box.offsets[along]]
        found = next(filter(box.overlaps, reaching), None)
        if found is not None:
            return found, box
        reaching.append(box)
    return None
