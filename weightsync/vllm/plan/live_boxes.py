"""A load plan the other way round: which box of which checkpoint tensor a live view is.

Loaders cut tensors into rows, columns and experts, and `merge_neighbours` joins what they cut: what
a copy reads is a view with any dimensions. Here it is put into those of its tensor again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.merge import row_major

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.vllm.plan.load_plan import LoadPlan, Slice

__all__ = ["PlacedBox", "placed_boxes"]


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a tensor and the slice of the plan that it is.

    Attributes:
        tensor: Name in the checkpoint.
        index: Of the slice.
        offsets: Where the box begins in the tensor, elements.
        lengths: How far it goes, elements.
        stride: From an element to the next in the parameter, elements.
    """

    tensor: str
    index: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    stride: tuple[int, ...]


def placed_boxes(plan: LoadPlan) -> tuple[PlacedBox, ...]:
    """Return every box that is live, also of tensors that repeat another one, as tied heads do.

    Raises:
        PlanRefusedError: A copy is no box of its tensor; naming the tensors.
    """
    boxes: list[PlacedBox] = []
    others: list[str] = []
    for index, item in enumerate(plan.slices):
        if not item.source.numel:
            continue
        box = _box(index, item, plan.tensors[item.tensor][1])
        if box is None:
            others.append(item.tensor)
        else:
            boxes.append(box)
    if others:
        msg = (
            "vLLM has spread these tensors over its parameters in steps, so that no view of them "
            "is a tensor of the checkpoint; push versions of this model in place of attaching"
        )
        raise PlanRefusedError(msg, sorted(set(others)))
    return (*boxes, *_repeated(plan, boxes))


def _repeated(plan: LoadPlan, boxes: Sequence[PlacedBox]) -> Iterator[PlacedBox]:
    for name, same in plan.same_as.items():
        for box in boxes:
            if box.tensor == same and name not in plan.loaded:
                yield PlacedBox(name, box.index, box.offsets, box.lengths, box.stride)


def _box(index: int, item: Slice, shape: Sequence[int]) -> PlacedBox | None:
    """Return the box of its tensor that a slice reads; None: it reads none."""
    box = _Box.at(item.source.offset, shape)
    steps = zip(item.source.shape, item.source.stride, item.target.stride, strict=True)
    if not all(length == 1 or box.spread(length, *strides) for length, *strides in steps):
        return None
    return PlacedBox(item.tensor, index, box.offsets, tuple(box.lengths), tuple(box.stride))


@dataclass
class _Box:
    """A box as far as it is known.

    Attributes:
        shape: Of the tensor.
        dense: Its strides.
        offsets: Where the box begins in it.
        lengths: How far it goes.
        stride: From an element to the next in the parameter.
    """

    shape: Sequence[int]
    dense: Sequence[int]
    offsets: tuple[int, ...]
    lengths: list[int]
    stride: list[int]

    @classmethod
    def at(cls, offset: int, shape: Sequence[int]) -> _Box:
        """Return one element of a tensor, so many elements behind its first."""
        dense = row_major(0, shape).stride
        offsets = []
        for step in dense:
            offsets.append(offset // step)
            offset %= step
        return cls(shape, dense, tuple(offsets), [1] * len(shape), [0] * len(shape))

    def spread(self, length: int, source: int, target: int) -> bool:
        """Put a dimension of a slice into those of the tensor, from the inner one outwards.

        Returns whether it is one of a box.

        Args:
            length: Elements of the dimension.
            source: Its stride in the tensor.
            target: Its stride in the parameter.
        """
        wide = [axis for axis, size in enumerate(self.shape) if size > 1]
        inner = [axis for axis in wide if self.dense[axis] == source]
        for axis in reversed([axis for axis in wide if inner and axis <= inner[0]]):
            if self.lengths[axis] > 1:
                return False
            self.stride[axis] = target
            if length <= self.shape[axis] - self.offsets[axis]:
                self.lengths[axis] = length
                return True
            if self.offsets[axis] or length % self.shape[axis]:
                return False
            self.lengths[axis] = self.shape[axis]
            length, target = length // self.shape[axis], target * self.shape[axis]
        return False
