"""The slices of a load plan as few blocks, each one range of a parameter's memory.

Fused parameters are filled by several slices without a gap between them: staged beside each other
they are one copy, and one comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from weightsync.vllm.cuda.memory_budget import aligned
from weightsync.vllm.plan.int_views import as_ints
from weightsync.vllm.plan.live_params import view_of
from weightsync.vllm.plan.load_plan import Strides
from weightsync.vllm.plan.ranges import ranges_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightsync.vllm.plan.live_params import Targets
    from weightsync.vllm.plan.load_plan import Slice
    from weightsync.vllm.plan.ranges import Part

__all__ = ["Block", "Blocks", "lay_out", "wide"]


@dataclass(frozen=True)
class Block:
    """What is copied at once.

    Attributes:
        param: Name of the live parameter.
        dtype: Of the parameter.
        place: Which part of it; without gaps unless a single slice has some.
        at: Where it begins in staging memory, in bytes; there it has no gaps.
        parts: The slices that fill it; none in a piece of a block.
    """

    param: str
    dtype: torch.dtype
    place: Strides
    at: int
    parts: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.place.numel * self.dtype.itemsize

    def staged(self, memory: torch.Tensor) -> torch.Tensor:
        """Return it in staging memory."""
        return memory[self.at : self.at + self.nbytes].view(self.dtype).view(self.place.shape)

    def live(self, targets: Targets) -> torch.Tensor:
        """Return it in the live parameter; call `targets.views` first."""
        return view_of(targets.param(self.param), self.place)

    def pieces(self, limit: int) -> Iterator[Block]:
        """Yield it in pieces of at most so many bytes; one with gaps stays as it is."""
        count = limit // self.dtype.itemsize
        if not self.place.contiguous or self.place.numel <= count:
            yield self
            return
        for begin in range(0, self.place.numel, count):
            size = min(count, self.place.numel - begin)
            place = Strides(self.place.offset + begin, (size,), (1,))
            at = self.at + begin * self.dtype.itemsize
            yield replace(self, place=place, at=at, parts=())


@dataclass(frozen=True)
class Blocks:
    """All blocks of a plan and the bytes of staging memory that they take together."""

    all: tuple[Block, ...]
    size: int


def lay_out(slices: Sequence[Slice], dtypes: Mapping[str, torch.dtype]) -> Blocks:
    """Return the blocks of a plan, in the order of its parameters.

    Args:
        slices: The copies. They do not overlap.
        dtypes: Of each parameter.
    """
    found: list[Block] = []
    at = 0
    for each in ranges_of(slices):
        block = Block(each.param, dtypes[each.param], each.place, at, each.parts)
        found.append(block)
        at += aligned(block.nbytes)
    return Blocks(tuple(found), at)


def wide(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of two tensors of one shape as the widest integers that fit both.

    Views without gaps become one row; others keep their shape and the width of their elements.
    """
    if left.is_contiguous() and right.is_contiguous():
        left, right = (side.reshape(-1) for side in (left, right))
        for words in (torch.int64, torch.int32, torch.int16):
            if all(_fits(side, words.itemsize) for side in (left, right)):
                return left.view(words), right.view(words)
        return left.view(torch.uint8), right.view(torch.uint8)
    return as_ints(left), as_ints(right)


def _fits(row: torch.Tensor, width: int) -> bool:
    begin = row.storage_offset() * row.element_size()
    return not (begin % width or row.nbytes % width or row.data_ptr() % width)
