"""The engine without vLLM, in this process: what users test their trainers against."""

from __future__ import annotations

import logging
from pathlib import Path

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import parse_header
from weightsync.testing import MemoryEngine

__all__ = ["load_memory_engine"]

logger = logging.getLogger(__name__)

_Tensor = tuple[str, tuple[int, ...], bytes]


def load_memory_engine(model: str, segment_socket: Path, ranks: int) -> MemoryEngine:
    """Return an engine that holds a checkpoint and generates nothing.

    Args:
        model: A safetensors file or a folder of them.
        segment_socket: Where its ranks get segments.
        ranks: How many.

    Raises:
        WeightSyncError: REQUEST_INVALID: the checkpoint cannot be read.
    """
    path = Path(model)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, _Tensor] = {}
    for file in files:
        tensors |= _read(file)
    if not tensors:
        raise _refused(path, "it holds no tensors")
    logger.warning("the engine is one for tests: it takes weights and generates nothing")
    checkpoint = str((path if path.is_dir() else path.parent).absolute())
    return MemoryEngine(tensors, segment_socket, ranks, attachable=True, checkpoint=checkpoint)


def _read(file: Path) -> dict[str, _Tensor]:
    try:
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        entries = parse_header(data[8:start])
    except (OSError, WeightSyncError) as error:
        raise _refused(file, str(error)) from error
    if any(entry.end > len(data) - start for entry in entries):
        raise _refused(file, "it is shorter than its header tells")
    return {
        entry.name: (entry.dtype, entry.shape, data[start + entry.begin : start + entry.end])
        for entry in entries
    }


def _refused(path: Path, why: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.REQUEST_INVALID,
        f"--model {path} cannot be used ({why}); name a safetensors file or a folder of them",
    )
