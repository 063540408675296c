"""Digests of tensors in device memory, computed there: the bytes do not cross the bus for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightsync.gpu.device_kernels import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.gpu.device_kernels import Kernels

__all__ = ["Digests", "digestible"]

#: Shorter texts are digested in another way, which the kernel does not know.
_LONGEST_SHORT = 240
_WIDTH = 16
#: Threads of a tensor: `WARPS` of kernels.cu and one more.
_THREADS = 17 * 32


def digestible(tensor: torch.Tensor) -> bool:
    """Return whether the kernel can digest a tensor."""
    return (
        tensor.nbytes > _LONGEST_SHORT and tensor.is_contiguous() and not tensor.data_ptr() % _WIDTH
    )


class Digests:
    """The xxh3-128 of tensors, as `weightsync.model.digest.tensor_digest` computes it.

    One block of threads digests one tensor, on an H200 at 36 GB/s: side by side they reach what the
    memory gives, and few of them leave the device to others.

    Args:
        kernels: Of their device.
        tensors: Which `digestible` has accepted; at least one.
    """

    def __init__(self, kernels: Kernels, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        rows = [[tensor.data_ptr(), tensor.nbytes] for tensor in tensors]
        self._kernels = kernels
        self._texts = torch.tensor(rows, dtype=torch.int64).to(device)
        self._found = torch.zeros(len(rows), 2, dtype=torch.int64, device=device)

    def queue(self, begin: int, end: int) -> None:
        """Queue the digests of tensors `begin` to `end` on the current stream."""
        texts, found = self._texts[begin:end], self._found[begin:end]
        Launch(self._kernels, "digest_texts", (end - begin, _THREADS), [texts, found]).queue()

    def results(self) -> list[bytes]:
        """Wait for the current stream; return the digests of all tensors."""
        return [
            b"".join(half.to_bytes(8, "big", signed=True) for half in halves)
            for halves in self._found.tolist()
        ]
