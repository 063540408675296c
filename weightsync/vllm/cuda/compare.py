"""Whether device memory holds what it must, bit for bit, with one answer for all at the end."""

from __future__ import annotations

import torch

from weightsync.vllm.cuda.blocks import wide

__all__ = ["Comparison", "limit_of", "unequal"]

_WIDE = torch.int64


def unequal(left: torch.Tensor, right: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return which integers differ, as truth values in the memory of `mask` if it has the room."""
    if left.dim() == 1 and left.numel() <= mask.numel():
        return torch.ne(left, right, out=mask[: left.numel()])
    return left.ne(right)


def limit_of(mask: torch.Tensor) -> int:
    """Return how many bytes of each side are compared at a time with so much scratch."""
    return mask.numel() * _WIDE.itemsize


class Comparison:
    """Collects what differs; the device is asked once.

    Args:
        mask: Truth values on the device, for scratch. Its size is that of a piece.
        most: Names that are added at most.
    """

    def __init__(self, mask: torch.Tensor, most: int) -> None:
        self._mask = mask
        self._flags = torch.zeros(most, dtype=torch.bool, device=mask.device)
        self._names: list[str] = []

    def add(self, name: str, live: torch.Tensor, wanted: torch.Tensor) -> None:
        """Queue the comparison of two tensors of one shape and dtype, on the current stream."""
        found = unequal(*wide(live, wanted), self._mask)
        if not found.numel() % _WIDE.itemsize and found.is_contiguous():
            found = found.reshape(-1).view(_WIDE)
        torch.any(found, out=self._flags[len(self._names)])
        self._names.append(name)

    def wrong(self) -> list[str]:
        """Wait for everything that was added; return the names of what differs, each once."""
        answers = self._flags[: len(self._names)].tolist()
        return list(dict.fromkeys(n for n, bad in zip(self._names, answers, strict=True) if bad))
