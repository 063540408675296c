"""The general plugin: runs in every vLLM process before a worker is built."""

from __future__ import annotations

import logging
from typing import Any

import torch

from weightsync.vllm.cpu_plain import leave_experts_plain, leave_linear_plain
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.plan.load_watch import watch_loading
from weightsync.vllm.plan.shared_params import share_loaded
from weightsync.vllm.reserved_room import reserve_room
from weightsync.vllm.transfer.registration import register_transfer
from weightsync.vllm.worker.worker_methods import install

__all__ = ["register"]

logger = logging.getLogger(__name__)


def _initialise_amx() -> None:
    # A worker on a host with AMX dies of an illegal instruction unless each process asks the
    # kernel for the tile registers first.
    initialise = getattr(torch.cpu, "_init_amx", None)
    if callable(initialise):
        initialise()


def _leave_plain(settings: EngineSettings) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if settings.cpu_plain_linear:
        leave_linear_plain()
    if settings.cpu_plain_experts:
        leave_experts_plain()


def _share(settings: EngineSettings, loaders: Any) -> None:
    from vllm.platforms import current_platform

    # Memory of a GPU can be shared as it is.
    if settings.attachable and current_platform.is_cpu():
        share_loaded(loaders)


def _reserve(settings: EngineSettings) -> None:
    from vllm.platforms import current_platform

    if settings.device_room is not None and current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        reserve_room(Worker, settings.device_room)


def register() -> None:
    """Install our worker methods and our backend, and watch what loading makes of a model.

    Idempotent, and without effect on what vLLM computes. With WEIGHTSYNC_DEVICE_ROOM its cache is
    smaller by what is not left otherwise.

    With WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 layers on a CPU also compute from plain parameters; with
    `linear` all but experts do. With WEIGHTSYNC_ATTACH=1 parameters on a CPU lie in shared memory.
    """
    _initialise_amx()
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.worker.worker_base import WorkerBase

    install(WorkerBase)
    watch_loading(base_loader)
    register_transfer()
    settings = EngineSettings.load()
    _leave_plain(settings)
    _share(settings, base_loader)
    _reserve(settings)
