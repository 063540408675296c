"""All contiguous ranges that a commit copies, in a launch or two, and compared in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.gpu.device_kernels import Launch
from weightsync.gpu.spans import THREADS, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.gpu.device_kernels import Kernels

__all__ = ["Spans"]


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
