"""All contiguous ranges that a commit copies, in a launch or two, and compared in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.vllm.cuda.kernels import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from weightsync.vllm.cuda.kernels import Kernels

__all__ = ["SPAN", "THREADS", "Spans", "cut", "fits"]

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


class Spans:
    """Pairs of live and staged memory.

    Args:
        kernels: Of their device.
        pairs: Live and staged side of each, which `fits` has accepted; at least one.
    """

    def __init__(
        self, kernels: Kernels, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        table = np.concatenate([cut(flag, *pair) for flag, pair in enumerate(pairs)])
        device = pairs[0][0].device
        self._table = torch.from_numpy(table).to(device)
        self._flags = torch.zeros(len(pairs), dtype=torch.uint8, device=device)
        # Two, so that a fault can be injected when half is written.
        self.copies = [
            Launch(kernels, "copy_spans", (len(half), THREADS), [half])
            for half in self._table.tensor_split(2)
            if len(half)
        ]
        self._comparison = Launch(
            kernels, "compare_spans", (len(table), THREADS), [self._table, self._flags]
        )

    def compare(self) -> None:
        """Queue the comparison of all."""
        self._flags.zero_()
        self._comparison.queue()

    def unequal(self) -> list[int]:
        """Wait for the comparison; return which pairs differ."""
        return [pair for pair, flag in enumerate(self._flags.tolist()) if flag]


def cut(flag: int, live: torch.Tensor, staged: torch.Tensor) -> NDArray[np.int64]:
    """Return the rows of a pair in the table of the kernels: `Span` in kernels.cu."""
    at = np.arange(0, live.nbytes, SPAN, dtype=np.int64)
    sizes = np.minimum(SPAN, live.nbytes - at)
    return np.stack([live.data_ptr() + at, staged.data_ptr() + at, sizes | flag << 32], axis=1)
