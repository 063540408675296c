"""Pairs of memory on a device, cut into the ranges of `Span` in kernels.cu."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["SPAN", "THREADS", "cut", "fits"]

#: What a kernel moves at once, bytes; both sides begin at a multiple of it.
_WIDTH = 16
#: Bytes of a block of threads, and how many those are. On an H200 15.2 GB are copied in 7.3 ms with
#: 64 KiB and 512, in 7.4 to 8.3 with 32 KiB to 1 MiB and 256 or 512.
SPAN, THREADS = 64 << 10, 512


def fits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype can be a span's two sides."""
    return (
        left.numel() > 0
        and left.is_contiguous()
        and right.is_contiguous()
        and not left.data_ptr() % _WIDTH
        and not right.data_ptr() % _WIDTH
    )


def cut(flag: int, live: torch.Tensor, staged: torch.Tensor) -> NDArray[np.int64]:
    """Return the rows of a pair in the table of the kernels, addresses and sizes in bytes.

    Args:
        flag: Of the pair, below 2^32.
        live: One side.
        staged: The other one, which `fits` has accepted.
    """
    at = np.arange(0, live.nbytes, SPAN, dtype=np.int64)
    sizes = np.minimum(SPAN, live.nbytes - at)
    return np.stack([live.data_ptr() + at, staged.data_ptr() + at, sizes | flag << 32], axis=1)
