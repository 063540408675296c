"""Pairs of device memory whose bytes are exchanged in a launch or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from weightsync.gpu.device_kernels import Launch
from weightsync.gpu.spans import THREADS, cut, fits
from weightsync.vllm.apply.writes import write_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.gpu.device_kernels import Kernels
    from weightsync.vllm.apply.parallel import SliceThreads

__all__ = ["SpanExchange"]


class SpanExchange:
    """See `Exchange`: through registers, each side read and written once.

    Args:
        kernels: Of their device; None: PyTorch copies each pair three times.
        pairs: Rows of bytes on the device.
    """

    def __init__(
        self, kernels: Kernels | None, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        fitting = [pair for pair in pairs if kernels is not None and fits(*pair)]
        known = {id(pair) for pair in fitting}
        self._rest = [pair for pair in pairs if id(pair) not in known]
        self._launches = []
        # Launches know addresses only.
        self._kept = fitting
        if kernels is not None and fitting:
            rows = np.concatenate([cut(0, *pair) for pair in fitting])
            table = torch.from_numpy(rows).to(fitting[0][0].device)
            # Two, so that a fault can be injected when half is written.
            self._launches = [
                Launch(kernels, "exchange_spans", (len(half), THREADS), [half])
                for half in table.tensor_split(2)
                if len(half)
            ]

    def run(self, threads: SliceThreads) -> None:
        """Queue it on the current stream."""
        launches, pairs = self._launches, self._rest

        def exchange(index: int) -> None:
            if index < len(launches):
                launches[index].queue()
                return
            left, right = pairs[index - len(launches)]
            kept = left.clone()
            left.copy_(right)
            right.copy_(kept)

        write_each(threads, exchange, [1] * len(launches) + [left.nbytes for left, _ in pairs])
