"""The general plugin: runs in every vLLM process before a worker is built."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from weightsync.vllm.cpu_plain import leave_experts_plain, leave_linear_plain
from weightsync.vllm.env import Amount, EngineSettings
from weightsync.vllm.extensions import process_starts, worker_methods
from weightsync.vllm.lineage import core_hooks
from weightsync.vllm.plan.load_watch import share_loaded, watch_loading
from weightsync.vllm.scoring import paused_scores
from weightsync.vllm.worker.worker_methods import install, register_methods

logger = logging.getLogger(__name__)


def reserve_room(worker_class: type, room: Amount) -> None:
    """Let workers on a GPU take less for their cache by what is wanted beside vLLM's share.

    What `gpu_memory_utilization` leaves counts first, and a cache of a given size stays as it is.
    Repeating it is harmless.
    """
    own: Any = vars(worker_class).get("determine_available_memory")
    if own is None or hasattr(own, "_weightsync"):
        return

    @functools.wraps(own)
    def determine_available_memory(self: Any, *args: Any, **kwargs: Any) -> int:
        found = int(own(self, *args, **kwargs))
        lacking = _lacking(self, room)
        if lacking <= 0 or getattr(self.cache_config, "kv_cache_memory_bytes", None):
            return found
        if lacking >= found:
            raise ValueError(
                f"WEIGHTSYNC_DEVICE_ROOM asks for {lacking} bytes more than "
                f"gpu_memory_utilization leaves, and vLLM has only {found} for its cache; lower "
                "one of the two"
            )
        logger.info(
            "weightsync: the cache is %d bytes smaller, for WEIGHTSYNC_DEVICE_ROOM", lacking
        )
        return found - lacking

    determine_available_memory._weightsync = True  # type: ignore[attr-defined]  # noqa: SLF001 - our mark
    worker_class.determine_available_memory = determine_available_memory  # type: ignore[attr-defined]  # VLLM's class


def _lacking(worker: Any, room: Amount) -> int:
    """Return how many bytes of the room are not left by what vLLM may take; 0: on a CPU."""
    if getattr(worker.device, "type", "") != "cuda":
        return 0
    total = int(worker.init_snapshot.total_memory)
    return room.of(total) - (total - int(worker.requested_memory))


def _initialise_amx() -> None:
    # A worker on a host with AMX dies of an illegal instruction unless each process asks the
    # kernel for the tile registers first.
    initialise = getattr(torch.cpu, "_init_amx", None)
    if callable(initialise):
        initialise()


def _follow(settings: EngineSettings, loaders: Any) -> None:
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if on_cpu and settings.cpu_plain_linear:
        leave_linear_plain()
    if on_cpu and settings.cpu_plain_experts:
        leave_experts_plain()
    # Memory of a GPU can be shared as it is.
    if on_cpu and settings.attachable:
        share_loaded(loaders)
    if settings.device_room is not None and current_platform.is_cuda():
        from vllm.v1.worker.gpu_worker import Worker

        reserve_room(Worker, settings.device_room)


def register() -> None:
    """Install our worker methods and our backend, and watch what loading makes of a model.

    Idempotent, and without effect on what vLLM computes. With WEIGHTSYNC_DEVICE_ROOM its cache is
    smaller by what is not left otherwise. With WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 layers on a CPU
    compute from plain parameters, with `linear` all but experts; with WEIGHTSYNC_ATTACH=1
    parameters on a CPU lie in shared memory.
    """
    _initialise_amx()
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    core_hooks.add_utilities(EngineCore)
    paused_scores.add_utilities(EngineCore)
    install(WorkerBase)
    register_methods(WorkerBase, worker_methods())
    watch_loading(base_loader)
    for start in process_starts():
        start()
    _follow(EngineSettings.load(), base_loader)
