"""vLLM hosted in this process; the only module of the server that imports `weightsync.vllm`."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from weightsync.vllm.bridge.embedded import EmbeddedEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightsync.engine import Engine

__all__ = ["start_embedded"]

logger = logging.getLogger(__name__)


async def start_embedded(model: str, segment_socket: Path, engine_args: Sequence[str]) -> Engine:
    """Return an engine that is up and paused, with vLLM's OpenAI API on top.

    Args:
        model: The directory or name that vLLM loads.
        segment_socket: Where its ranks get segments.
        engine_args: vLLM's own flags.

    Raises:
        WeightSyncError: ENGINE_UNSUPPORTED or REQUEST_INVALID with the remedy.
    """
    # This process has threads by now, and a fork would copy their locks in any state.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    flags = ["--model", model, *engine_args]
    engine = await EmbeddedEngine.launch(flags, str(segment_socket))
    logger.info("vLLM's API on %s", engine.address)
    return engine
