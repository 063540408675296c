"""A safetensors file in shared memory that is filled tensor by tensor, as they come."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import torch

from weightsync.errors import Reason, WeightSyncError
from weightsync.free_memory import available_bytes
from weightsync.model.dtypes import safetensors_dtype
from weightsync.model.layout import build_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.model.manifest import TensorEntry

__all__ = ["TensorKind", "UpdateFile"]

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Name, dtype and shape of a tensor.
TensorKind = tuple[str, torch.dtype, tuple[int, ...]]


class UpdateFile:
    """Holds tensors in host memory, reserved in full at the start: no write fails for lack of it.

    Args:
        name: Of the file.
        tensors: What it will hold, in this order; each name once.

    Attributes:
        name: Of the file.
        size: Bytes in all.

    Raises:
        WeightSyncError: LAYOUT_INVALID for a dtype that safetensors does not have;
            MEMORY_EXHAUSTED.
    """

    def __init__(self, name: str, tensors: Sequence[TensorKind]) -> None:
        header, entries = build_header((n, _dtype(n, dtype), shape) for n, dtype, shape in tensors)
        self.name = name
        self._entries = {entry.name: entry for entry in entries}
        self._begin = 8 + len(header)
        self.size = self._begin + max((entry.end for entry in entries), default=0)
        if self.size > (free := available_bytes()):
            raise WeightSyncError(
                Reason.MEMORY_EXHAUSTED,
                f"an update of {self.size} bytes is kept in host memory until it is a version, and "
                f"{free} bytes are free; free as much, or lower --slots of weightsync-server",
            )
        self._fd, self._memory = _reserved(self.size)
        self._memory[: self._begin] = len(header).to_bytes(8, "little") + header

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, of the dtype and shape that were announced, to its place."""
        entry = self._entries[name]
        if entry.end > entry.begin:
            self._place(entry).copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))

    def sealed(self) -> int:
        """Return a descriptor of what nobody can change any more; `close` closes it.

        Raises:
            OSError: Somebody could still write.
        """
        self._memory.close()
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        return self._fd

    def close(self) -> None:
        """Give the memory back as soon as nobody else has it; nobody may write any more."""
        self._memory.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _place(self, entry: TensorEntry) -> torch.Tensor:
        size = entry.end - entry.begin
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=size, offset=self._begin + entry.begin
        )


def _reserved(size: int) -> tuple[int, mmap.mmap]:
    """Return a descriptor of so much memory, and a writable mapping of it."""
    fd = os.memfd_create("weightsync-update", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)
        return fd, mmap.mmap(fd, size)
    except OSError as error:
        os.close(fd)
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"the host refused {size} bytes of shared memory for an update ({error.strerror}); "
            "free memory",
        ) from error


def _dtype(name: str, dtype: torch.dtype) -> str:
    if found := safetensors_dtype(dtype):
        return found
    raise WeightSyncError(
        Reason.LAYOUT_INVALID,
        f"tensor {name[:100]!r} is of {dtype}, which safetensors does not have; send another dtype",
    )
