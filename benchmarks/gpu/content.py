"""Contents that follow one another: each differs from the one before in every value."""

from __future__ import annotations

from typing import Any

__all__ = ["as_ints", "gray_step"]

_BITS = 4


def as_ints(tensor: Any) -> Any:
    """Return a view of a tensor's bits as integers of the same width."""
    import torch

    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.view(widths[tensor.element_size()])


def gray_step(number: int) -> int:
    """Return the bits that change from content `number` - 1 to `number`, the same in every value.

    The last 15 contents differ from each other.
    """
    # A Gray code in the low bits of the mantissa: no value becomes infinite or NaN.
    changes = number % (1 << _BITS) or 1 << (_BITS - 1)
    return changes & -changes
