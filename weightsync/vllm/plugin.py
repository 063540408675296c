"""The general plugin: runs in every vLLM process before a worker is built."""

from __future__ import annotations

import logging

import torch

from weightsync.vllm.env import EngineSettings
from weightsync.vllm.plan.load_watch import watch_loading
from weightsync.vllm.worker.worker_methods import install

__all__ = ["register"]

logger = logging.getLogger(__name__)


def _initialise_amx() -> None:
    # A worker on a host with AMX dies of an illegal instruction unless each process asks the
    # kernel for the tile registers first.
    initialise = getattr(torch.cpu, "_init_amx", None)
    if callable(initialise):
        initialise()


def _turn_repacking_off() -> None:
    """Make vLLM's CPU linear layers compute from their parameters, as they do on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layer_utils

    # The dispatcher takes the first of: sgl kernel, oneDNN, torch. Torch's reads the parameter.
    ops._supports_onednn = False  # noqa: SLF001
    layer_utils.check_cpu_sgl_kernel = lambda *_, **__: False


def register() -> None:
    """Install our worker methods and watch what loading makes of a model.

    Idempotent, and without effect on what vLLM computes.

    With WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 it also turns the repacking of weights off on CPUs.
    """
    _initialise_amx()
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.worker.worker_base import WorkerBase

    install(WorkerBase)
    watch_loading(base_loader)
    if EngineSettings.load().cpu_plain_weights:
        _turn_repacking_off()
