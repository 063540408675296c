"""Whether device memory holds what it must, bit for bit, with one answer for all at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.vllm.cuda.blocks import wide

__all__ = ["Comparison", "limit_of"]

_WIDE = torch.int64


def limit_of(mask: torch.Tensor) -> int:
    """Return how many bytes of each side are compared at a time with so much scratch."""
    return mask.numel() * _WIDE.itemsize


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two sides as integers, where their truth values go, and the answer.

    In a pause each view that is made costs as much as a launch, so all are made before it.
    """

    left: torch.Tensor
    right: torch.Tensor
    flag: torch.Tensor
    out: torch.Tensor | None
    #: The same memory, as few wide integers.
    reduced: torch.Tensor | None

    def queue(self) -> None:
        if self.out is None or self.reduced is None:
            torch.any(self.left.ne(self.right), out=self.flag)
        else:
            torch.ne(self.left, self.right, out=self.out)
            torch.any(self.reduced, out=self.flag)


class Comparison:
    """Collects what differs; the device is asked once.

    Args:
        mask: Truth values on the device, for scratch. Its size is that of a piece.
        most: How many are added at most.
    """

    def __init__(self, mask: torch.Tensor, most: int) -> None:
        self._mask = mask
        self._flags = torch.zeros(most, dtype=torch.bool, device=mask.device)
        self._free = list(self._flags.unbind())
        self._names: list[str] = []
        self._pairs: list[_Pair] = []

    def add(self, name: str, live: torch.Tensor, wanted: torch.Tensor) -> None:
        """Have two tensors of one shape and dtype compared by `queue`."""
        self._pairs.append(self._pair(name, live, wanted))

    def queue_one(self, name: str, live: torch.Tensor, wanted: torch.Tensor) -> None:
        """Queue a comparison on the current stream; nothing of it is kept."""
        self._pair(name, live, wanted).queue()

    def _pair(self, name: str, live: torch.Tensor, wanted: torch.Tensor) -> _Pair:
        left, right = wide(live, wanted)
        out = reduced = None
        if left.dim() == 1 and left.numel() <= self._mask.numel():
            out = self._mask[: left.numel()]
            reduced = out if out.numel() % _WIDE.itemsize else out.view(_WIDE)
        flag = self._free[len(self._names)]
        self._names.append(name)
        return _Pair(left, right, flag, out, reduced)

    def queue(self) -> None:
        """Queue all comparisons that were added."""
        for pair in self._pairs:
            pair.queue()

    def wrong(self) -> list[str]:
        """Wait for everything that was queued; return the names of what differs, each once."""
        answers = self._flags[: len(self._names)].tolist()
        found = (name for name, bad in zip(self._names, answers, strict=True) if bad)
        return list(dict.fromkeys(found))
