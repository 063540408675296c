"""Puts our backends where vLLM looks for the backends of weight transfers."""

from __future__ import annotations

import contextlib

from weightsync.vllm.transfer.transfer_verbs import BACKEND, answer_verbs
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS

__all__ = ["register_transfer"]


def register_transfer() -> None:
    """Let `--weight-transfer-config '{"backend": "weightsync"}'` be taken by this process.

    So are `weightsync_nccl` and `weightsync_ipc`.

    Repeating it is harmless. A vLLM without such backends stays as it is.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    engines = {BACKEND: "WeightSyncTransferEngine"}
    engines |= dict.fromkeys(RECEIVING_BACKENDS, "ReceivingTransferEngine")
    for backend, engine in engines.items():
        # The factory refuses a name that it knows; plugins may run more than once.
        with contextlib.suppress(ValueError):
            WeightTransferEngineFactory.register_engine(
                backend, "weightsync.vllm.transfer.transfer_engine", engine
            )
    answer_verbs(AsyncLLM)
