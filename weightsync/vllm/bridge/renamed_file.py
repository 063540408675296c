"""A safetensors file with other names of tensors: the draft's checkpoint, as versions have it."""

from __future__ import annotations

import json
import os

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.checkpoint_folder import read_header
from weightsync.model.memory_file import in_memory

__all__ = ["renamed"]


def renamed(fd: int, prefix: str, name: str = "model.safetensors") -> int:
    """Return a descriptor of the same tensors with longer names, in memory; the caller closes it.

    Format: https://github.com/huggingface/safetensors#format

    Args:
        fd: Of a safetensors file.
        prefix: What their names begin with in the copy.
        name: Of the file, for the sentence.

    Raises:
        WeightSyncError: ENGINE_REFUSED when it is no safetensors file, or there is no memory.
    """
    size = os.fstat(fd).st_size
    try:
        header = read_header(name, fd, size)
        names = {
            name if name == "__metadata__" else prefix + name: value
            for name, value in json.loads(header).items()
        }
    except (ValueError, AttributeError, RecursionError, WeightSyncError) as error:
        raise WeightSyncError(
            Reason.ENGINE_REFUSED,
            f"the draft's checkpoint cannot be read: {error}; restore its files",
        ) from error
    text = json.dumps(names, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        return in_memory(text, fd, [(8 + len(header), size)], "the draft's checkpoint")
    except WeightSyncError as error:
        raise WeightSyncError(Reason.ENGINE_REFUSED, error.message) from error
