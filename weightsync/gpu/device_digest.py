"""Digests of tensors in device memory, computed there: the bytes do not cross the bus for them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from weightsync.gpu.device_kernels import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.gpu.device_kernels import Kernels

__all__ = ["DeviceDigests", "Digests", "digestible"]

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


class DeviceDigests:
    """Digests that a device computes while others work; any thread may ask for them.

    Args:
        kernels: Of the device.
        tensors: All bytes of each, in a row. They must stay as they are until a digest was given.

    Attributes:
        names: Those that it can digest.
    """

    def __init__(self, kernels: Kernels, tensors: Mapping[str, torch.Tensor]) -> None:
        known = [name for name, tensor in tensors.items() if digestible(tensor)]
        # The longest first: each is the work of one block of threads.
        known.sort(key=lambda name: -tensors[name].nbytes)
        self.names = frozenset(known)
        self._order = known
        self._lock = threading.Lock()
        self._found: dict[str, bytes] | None = None if known else {}
        if not known:
            return
        self._digests = Digests(kernels, [tensors[name] for name in known])
        self._digests.queue(0, len(known))
        device = tensors[known[0]].device
        self._done: Any = None
        if device.type == "cuda":
            # Of that device, whichever is the thread's own.
            stream = torch.cuda.current_stream(device)
            self._done = stream.record_event()

    def of(self, name: str) -> bytes:
        """Wait for the digest of a tensor of `names`, and return it."""
        with self._lock:
            if self._found is None:
                if self._done is not None:
                    # Whoever asks may have another stream.
                    self._done.synchronize()
                self._found = dict(zip(self._order, self._digests.results(), strict=True))
            return self._found[name]
