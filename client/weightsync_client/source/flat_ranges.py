"""Tensors of which a process holds a range of the elements, counted in a row, as boxes."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason
from weightsync.model.boxes import Box
from weightsync_client.errors import refuse
from weightsync_client.source.sharded_tensors import ShardedTensor
from weightsync_client.source.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

__all__ = ["FlatRange", "FlatRanges", "boxes_of"]


class FlatRange(NamedTuple):
    """What a process holds of a tensor.

    Attributes:
        whole: The tensor without bytes, on PyTorch's meta device.
        begin: Where in it the range begins, in elements counted row by row.
        data: The elements, in one dimension; none: the process holds nothing of it.
        replica: A lower process holds the same.
    """

    whole: torch.Tensor
    begin: int
    data: torch.Tensor
    replica: bool = False


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes that a range of elements is, in its order: at most 2 * dimensions - 1.

    Args:
        shape: Of the tensor, in elements.
        begin: First element, counted row by row.
        end: One past the last.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:
        return _in_row(shape, last, begin, end)
    boxes = _in_row(shape, first - 1, begin, first * row)
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return boxes + _in_row(shape, last, last * row, end)


def _in_row(shape: Sequence[int], index: int, begin: int, end: int) -> list[Box]:
    start = index * math.prod(shape[1:])
    return [
        Box((index, *box.offsets), (1, *box.sizes))
        for box in boxes_of(shape[1:], begin - start, end - start)
    ]


class FlatRanges:
    """Ranges of the tensors of a model, while it is found out what a checkpoint makes of these.

    That is done with the tensors without bytes. A checkpoint may have a part of one as a tensor of
    its own, such as one of the experts that a library has fused.

    Args:
        ranges: All of them, and each as often as it has names.
    """

    def __init__(self, ranges: Iterable[FlatRange]) -> None:
        self._ranges = {id(part.whole): part for part in ranges}

    def views(self) -> AbstractContextManager[object]:
        """Within the block a part of a tensor is never copied, so that `local_part` finds it."""
        from torch.overrides import TorchFunctionMode

        class Views(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                del types
                if getattr(func, "__name__", "") == "contiguous" and args[0].is_meta:
                    return args[0]
                return func(*args, **(kwargs or {}))

        return Views()

    def local_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor | ShardedTensor:
        """Return what the process holds of a tensor.

        Args:
            name: Of the tensor.
            tensor: One without bytes, or a part of one; any other is returned as it is.

        Raises:
            InvalidError: Its elements are in another order than those of the range.
        """
        if not tensor.is_meta:
            return tensor
        base = tensor._base  # noqa: SLF001 - PyTorch has no other name for it
        part = self._ranges.get(id(tensor if base is None else base))
        if part is None or not tensor.is_contiguous():
            raise refuse(
                Reason.REQUEST_INVALID,
                f"tensor {name!r} is not in the order in which the processes hold its elements; "
                "train with FSDP2 (fully_shard), or push a full state dict",
            )
        start = int(tensor.storage_offset())
        begin = max(part.begin, start)
        end = min(part.begin + len(part.data), start + tensor.numel())
        boxes, at = [], begin - part.begin
        for box in boxes_of(tensor.shape, begin - start, end - start):
            boxes.append((box.offsets, part.data[at : at + box.elements].view(box.sizes)))
            at += box.elements
        dtype = dtype_name(name, str(part.data.dtype).removeprefix("torch."))
        return ShardedTensor(tuple(tensor.shape), dtype, boxes, part.replica)
