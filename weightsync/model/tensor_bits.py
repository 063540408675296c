"""Elements of PyTorch tensors as integers, to be compared bit for bit.

So NaN equals itself, and -0.0 differs from 0.0.
"""

from __future__ import annotations

import torch

#: Integers by bytes of an element.
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers, without a copy."""
    return tensor.view(INTS[tensor.element_size()])


def wide(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors of one shape as the widest integers that fit both.

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
