"""What `weightsync.model.float_casts` does, for PyTorch's tensors on their device: bit for bit."""

from __future__ import annotations

from typing import cast

import torch

from weightsync.model.dtypes import torch_dtype
from weightsync.model.float_casts import FLOATS, NON_FINITE, CastRangeError
from weightsync.model.tensor_bits import INTS


def find(flat: torch.Tensor, dtype: str) -> int:
    """Return the position of the first word of `dtype` that is no finite number; -1: all are."""
    width, mask, value = NON_FINITE[dtype]
    found = flat.view(INTS[width]).bitwise_and(mask).eq(value)
    return _first(found) if bool(found.any()) else -1


def cast_elements(flat: torch.Tensor, given: str, wanted: str) -> torch.Tensor:
    """Return the bytes of whole elements, cast from `given` to `wanted`.

    Raises CastRangeError if a finite one would not stay so.
    """
    before, to = flat.view(_dtype(given)), _dtype(wanted)
    # As NumPy's, which has no wider float: what float32 makes of a float64 is rounded again.
    narrow = before.float() if given == "F64" and to is not torch.float32 else before
    made = narrow.to(to)
    if not bool(made.isfinite().all()):
        lost = before.isfinite() & made.isfinite().logical_not()
        if bool(lost.any()):
            at = _first(lost)
            raise CastRangeError(at, float(before[at]))
        # Which NaN a cast makes is not the same in all of PyTorch's loops.
        words = made.view(INTS[NON_FINITE[wanted].width])
        words.masked_fill_(made.isnan(), FLOATS[wanted])
    return made.view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    # Every PyTorch has the four floats.
    return cast("torch.dtype", torch_dtype(name))


def _first(found: torch.Tensor) -> int:
    return int(found.to(torch.uint8).argmax())
