"""Which tensors lie where in safetensors files that are open already."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import MAX_HEADER_BYTES, check_shard, check_version, parse_header
from weightsync.model.manifest import ShardEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.model.manifest import Layout, TensorEntry
    from weightsync.shm.segment_socket import OfferedFile

__all__ = ["read_layout"]


def read_layout(files: Sequence[OfferedFile]) -> Layout:
    """Return the layout of a version of which each file is a shard; their sizes are what it says.

    Args:
        files: Name, size in bytes and descriptor of each; they are neither moved nor closed.

    Raises:
        WeightSyncError: SHARD_INVALID, LAYOUT_INVALID: they are no whole safetensors files.
    """
    read = [_read_shard(index, file) for index, file in enumerate(files)]
    return check_version([shard for shard, _ in read], [tensors for _, tensors in read])


def _read_shard(index: int, file: OfferedFile) -> tuple[ShardEntry, tuple[TensorEntry, ...]]:
    name, size, fd = file
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"{json.dumps(name[:100])} is no safetensors file: {length} bytes of header in {size}",
        )
    shard = ShardEntry(name[:255], size, length)
    return shard, check_shard(shard, parse_header(os.pread(fd, length, 8), index))
