"""A safetensors file with other names of tensors: the draft's checkpoint, as versions have it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import MAX_HEADER_BYTES

__all__ = ["renamed"]

#: Bytes that the kernel copies in one call.
_PIECE = 1 << 30


def renamed(fd: int, prefix: str) -> int:
    """Return a descriptor of the same tensors with longer names, in memory; the caller closes it.

    Format: https://github.com/huggingface/safetensors#format

    Args:
        fd: Of a safetensors file.
        prefix: What their names begin with in the copy.

    Raises:
        WeightSyncError: ENGINE_REFUSED when it is no safetensors file, or there is no memory.
    """
    try:
        header, begin = _header(fd)
        names = {name if name == "__metadata__" else prefix + name: v for name, v in header.items()}
    except (ValueError, AttributeError) as error:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"the draft's checkpoint cannot be read: {error}; restore its files",
        ) from error
    if os.fstat(fd).st_size > (free := _available()):
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"the draft's checkpoint takes {os.fstat(fd).st_size} bytes of memory while it is "
            f"read, and {free} are there; free as much",
        )
    text = json.dumps(names, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    copy = os.memfd_create("weightsync-draft")
    try:
        os.write(copy, len(text).to_bytes(8, "little") + text)
        _append(copy, fd, begin)
    except OSError as error:
        os.close(copy)
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"the draft's checkpoint cannot be read: {error}; it needs as much memory as its files",
        ) from error
    return copy


def _header(fd: int) -> tuple[dict[str, object], int]:
    """Return the header of a safetensors file, and where its data begin."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES:
        msg = f"{length} bytes of header"
        raise ValueError(msg)
    return json.loads(os.pread(fd, length, 8)), 8 + length


def _available() -> int:
    """Return the bytes of memory that can be had without swapping, as in proc(5)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _append(copy: int, fd: int, begin: int) -> None:
    while count := os.sendfile(copy, fd, begin, _PIECE):
        begin += count
