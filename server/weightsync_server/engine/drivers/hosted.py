"""Engines inside the server's process: vLLM, or one for tests that holds a checkpoint.

The only module of the server that imports `weightsync.vllm`, and only to start vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from weightsync.engine import Engine
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.checkpoint_folder import CheckpointFile, open_checkpoint
from weightsync.model.manifest import TensorEntry
from weightsync.testing import MemoryEngine

logger = logging.getLogger(__name__)


async def start_embedded(model: str, segment_socket: Path, engine_args: Sequence[str]) -> Engine:
    """Return an engine that is up and paused, with vLLM's flags and OpenAI API on top."""
    from weightsync.vllm.endpoint import launch

    # This process has threads by now, and a fork would copy their locks in any state.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    flags = ["--model", model, *engine_args]
    engine = await launch(flags, str(segment_socket))
    logger.info("vLLM's API on %s", engine.address)
    return engine


_Tensor = tuple[str, tuple[int, ...], bytes]


def load_memory_engine(model: str, segment_socket: Path, ranks: int) -> MemoryEngine:
    """Return an engine that holds one or a folder of safetensors files, and generates nothing."""
    path = Path(model)
    folder, names = (path, None) if path.is_dir() else (path.parent, [path.name])
    try:
        tensors = _read(folder, names)
    except (OSError, WeightSyncError) as error:
        raise _refused(path, str(error)) from error
    if not tensors:
        raise _refused(path, "it holds no tensors")
    logger.warning("this is the engine for tests: it takes weights and generates nothing")
    checkpoint = str(folder.absolute())
    return MemoryEngine(tensors, segment_socket, ranks, attachable=True, checkpoint=checkpoint)


def _read(folder: Path, names: list[str] | None) -> dict[str, _Tensor]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = open_checkpoint(fd, names=names)
    finally:
        os.close(fd)
    try:
        return {
            tensor.name: (tensor.dtype, tensor.shape, _bytes(file, tensor))
            for file, tensors in zip(found.files, found.chosen(), strict=True)
            for tensor in tensors
        }
    finally:
        found.close()


def _bytes(file: CheckpointFile, tensor: TensorEntry) -> bytes:
    # One call gives at most 2 GiB.
    start = file.entry.data_start
    steps = range(start + tensor.begin, start + tensor.end, 1 << 30)
    return b"".join(os.pread(file.fd, min(1 << 30, start + tensor.end - at), at) for at in steps)


def _refused(path: Path, why: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.REQUEST_INVALID,
        f"--model {path} cannot be used ({why}); name a safetensors file or a folder of them",
    )
