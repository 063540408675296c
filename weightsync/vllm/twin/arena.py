"""The arena: memory of a loader that holds a loaded version, and that a rank exchanges with.

On a host it is a memfd, handed over as a descriptor; on a GPU an allocation that the rank opens by
its CUDA IPC handle.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightsync.gpu.ipc import device_with, place_of
from weightsync.shm.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LoaderArena", "RankArena"]

#: Bytes at a multiple of which every piece begins, on both sides of an exchange.
_ALIGNED = 512


def _places(spans: Sequence[int]) -> tuple[list[int], int]:
    """Return where each piece begins, and the bytes of all."""
    ends = list(itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in spans))
    return [0, *ends[:-1]], ends[-1] if ends else 0


def _cut(memory: torch.Tensor, spans: Sequence[int]) -> list[torch.Tensor]:
    begins, _ = _places(spans)
    return [memory[at : at + size] for at, size in zip(begins, spans, strict=True)]


class LoaderArena:
    """The arena in the process that loads.

    Args:
        spans: Bytes of each piece of memory.
        device: Where it is.

    Attributes:
        nbytes: Of all.
        memory: Each piece, as a row of bytes.

    Raises:
        WeightSyncError: MEMORY_EXHAUSTED: the host has not got the memory.
        torch.OutOfMemoryError: The device has not.
    """

    def __init__(self, spans: Sequence[int], device: torch.device) -> None:
        _, self.nbytes = _places(spans)
        self._segment: Segment | None = None
        if device.type == "cuda":
            # Of its own allocation: nothing else of this process is seen by who opens it.
            whole = torch.empty(max(self.nbytes, 32 << 20), dtype=torch.uint8, device=device)
        else:
            self._segment = Segment.create(self.nbytes)
            whole = torch.from_numpy(np.frombuffer(self._segment.view, dtype=np.uint8))
        self._whole = whole
        self.memory = _cut(whole, spans)

    def share(self) -> tuple[dict[str, Any], list[int]]:
        """Return what `RankArena` opens: a document, and descriptors, which stay this one's."""
        if self._segment is not None:
            return {"bytes": self._segment.capacity}, [self._segment.fd]
        place = place_of(self._whole.data_ptr())
        return {"handle": place.handle.hex(), "offset": place.offset}, []


class RankArena:
    """The arena in the rank.

    Args:
        document: From `LoaderArena.share`.
        fds: From there as well; closed in any case.
        spans: Bytes of each piece of memory.
        device: Of the rank.

    Attributes:
        nbytes: Of all.
        memory: Each piece, as a row of bytes.

    Raises:
        DeviceError: The device's memory cannot be opened here.
        OSError: The host's cannot be mapped.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        fds: Sequence[int],
        spans: Sequence[int],
        device: torch.device,
    ) -> None:
        self._opened = contextlib.ExitStack()
        _, self.nbytes = _places(spans)
        try:
            if device.type == "cuda":
                whole = self._open(document, self.nbytes, device)
            else:
                mapping = mmap.mmap(fds[0], int(document["bytes"]))
                whole = torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))
        finally:
            for fd in fds:
                os.close(fd)
        self.memory = _cut(whole, spans)

    def _open(self, document: Mapping[str, Any], size: int, device: torch.device) -> torch.Tensor:
        here = torch.empty(1, dtype=torch.uint8, device=device)
        handle = bytes.fromhex(document["handle"])
        base, _ = self._opened.enter_context(device_with(here.data_ptr()).opened(handle))
        memory = _DeviceMemory(base + int(document["offset"]), size)
        return torch.as_tensor(memory, device=device)

    def close(self) -> None:
        """Let go of it; nothing may be under way there."""
        self.memory = []
        self._opened.close()


class _DeviceMemory:
    """Tells torch of memory that it has not allocated.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
