"""Neighbouring copies of a load plan as one.

Loaders cut a tensor of all experts into one copy for each expert and half. A copy costs as much
time as a few kilobytes of it, whenever a version is prepared or written.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.vllm.plan.load_plan import Strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.vllm.plan.load_plan import LoadPlan, Slice

__all__ = ["merge_neighbours", "row_major"]


def row_major(offset: int, shape: Sequence[int]) -> Strides:
    """Return the view of that shape that has no gaps."""
    stride, size = [], 1
    for length in reversed(shape):
        stride.append(size)
        size *= length
    return Strides(offset, tuple(shape), tuple(reversed(stride)))


def merge_neighbours(plan: LoadPlan) -> LoadPlan:
    """Return a plan that makes the same copies, as few as they can be made with.

    Copies of one tensor are one where they fill a range of a parameter without a gap and their
    sources follow each other in equal steps.
    """
    by_param: dict[str, list[Slice]] = defaultdict(list)
    for item in plan.slices:
        by_param[item.param].append(item)
    slices = tuple(merged for group in by_param.values() for merged in _merged(group))
    return plan if len(slices) == len(plan.slices) else replace(plan, slices=slices)


def _merged(group: Sequence[Slice]) -> Iterator[Slice]:
    run: list[Slice] = []
    for item in sorted(group, key=lambda item: item.target.offset):
        if run and not _follows(run, item):
            yield _as_one(run)
            run = []
        run.append(item)
    if run:
        yield _as_one(run)


def _follows(run: Sequence[Slice], item: Slice) -> bool:
    """Whether a copy continues those before it on both sides."""
    first, last = run[0], run[-1]
    if (item.tensor, item.cast) != (last.tensor, last.cast):
        return False
    if (item.source.shape, item.source.stride) != (last.source.shape, last.source.stride):
        return False
    if not (item.target.numel and last.target.contiguous and item.target.contiguous):
        return False
    step = item.source.offset - last.source.offset
    regular = len(run) == 1 or step == run[1].source.offset - first.source.offset
    return step > 0 and regular and item.target.offset == last.target.offset + last.target.numel


def _as_one(run: Sequence[Slice]) -> Slice:
    first = run[0]
    if len(run) == 1:
        return first
    step = run[1].source.offset - first.source.offset
    source = _simplified(
        Strides(first.source.offset, (len(run), *first.source.shape), (step, *first.source.stride))
    )
    return replace(first, source=source, target=row_major(first.target.offset, source.shape))


def _simplified(view: Strides) -> Strides:
    """Return the same elements in the same order with the fewest dimensions."""
    shape: list[int] = []
    stride: list[int] = []
    for length, step in zip(view.shape, view.stride, strict=True):
        if length == 1:
            continue
        if shape and stride[-1] == length * step:
            shape[-1] *= length
            stride[-1] = step
        else:
            shape.append(length)
            stride.append(step)
    return Strides(view.offset, tuple(shape), tuple(stride))
