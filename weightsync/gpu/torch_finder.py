"""Which elements of pairs of tensors differ, where our kernels cannot look: by PyTorch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.gpu.finder import Pair, Step

__all__ = ["TorchFinder"]


class TorchFinder:
    """Looks at one pair after the other; see `weightsync.gpu.finder.Finder`.

    Args:
        pairs: Any strides; those that are taken are contiguous rows.
        mask: Truth values of their device, for scratch.
    """

    def __init__(self, pairs: Sequence[Pair], mask: torch.Tensor) -> None:
        self._pairs = pairs
        self._mask = mask
        self._counts: list[int] = []

    def count(self, step: Step) -> list[int]:
        """See `Finder`."""
        counts = []
        for pair in self._pairs:
            counts.append(self._unequal(pair).sum())
            step(pair[0].nbytes)
        self._counts = torch.stack(counts).tolist() if counts else []
        return self._counts

    def take(
        self,
        chosen: Sequence[bool],
        row: int,
        positions: torch.Tensor,
        after: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """See `Finder`."""
        changed = torch.zeros(1, dtype=torch.int32, device=positions.device)
        begin = 0
        for pair, count, wanted in zip(self._pairs, self._counts, chosen, strict=True):
            if not wanted:
                continue
            marks = self._unequal(pair)
            changed |= marks.sum() != count
            places = _places(marks, count)
            end = begin + count
            torch.index_select(pair[1], 0, places, out=after[begin:end])
            first = (pair[0].data_ptr() - row) // pair[0].element_size()
            torch.add(places, first, out=positions[begin:end])
            step(pair[0].nbytes)
            begin = end
        return changed

    def _unequal(self, pair: Pair) -> torch.Tensor:
        left, right = pair
        if left.dim() == 1 and left.numel() <= self._mask.numel():
            return torch.ne(left, right, out=self._mask[: left.numel()])
        return left.ne(right)


def _places(marks: torch.Tensor, count: int) -> torch.Tensor:
    """Return where so many marks lie, without asking the device where PyTorch can do that.

    The first element takes the place of those that are missing by now.
    """
    try:
        return torch.nonzero_static(marks, size=count, fill_value=0).reshape(-1)
    except NotImplementedError:
        found = marks.nonzero().reshape(-1)[:count]
        return torch.cat([found, found.new_zeros(count - len(found))])
