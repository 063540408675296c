"""Weights as the ranks of a trainer gather them: none comes before all of them ask for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CollectiveWeights", "Pairs", "random_pairs"]

Pairs = list[tuple[str, torch.Tensor]]


class CollectiveWeights:
    """What every rank iterates; a rank that stops early leaves the others waiting.

    Args:
        pairs: All of it.
        ranks: How many take part.
        fails_at: Raises a ValueError on all of them in place of this pair.

    Attributes:
        read: How many pairs each rank has got.
    """

    def __init__(
        self, pairs: Sequence[tuple[str, torch.Tensor]], ranks: int, fails_at: int | None = None
    ) -> None:
        self._pairs, self._fails_at = pairs, fails_at
        self._barrier = threading.Barrier(ranks)
        self.read = [0] * ranks

    def __call__(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs of a rank, read without gradients as the rank would."""
        for index, pair in enumerate(self._pairs):
            assert not torch.is_grad_enabled()
            self._barrier.wait(20)
            if index == self._fails_at:
                msg = "the gather failed"
                raise ValueError(msg)
            self.read[rank] += 1
            yield pair


def random_pairs(seed: int = 0) -> Pairs:
    """Return five small tensors; the same ones for a seed."""
    made = torch.Generator().manual_seed(seed)
    return [(f"layer.{i}", torch.randn(8, 16, generator=made).bfloat16()) for i in range(5)]
