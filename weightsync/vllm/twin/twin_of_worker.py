"""The twin of a vLLM worker: what its loader begins with."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.vllm.plan.load_watch import load_call
from weightsync.vllm.plan.model_parts import parts_of, shared_modules
from weightsync.vllm.twin.loader_config import ModelLoad, PartLoad, dump_config
from weightsync.vllm.twin.loader_process import LoaderError, LoaderStart
from weightsync.vllm.twin.twin_transform import TwinTransform

if TYPE_CHECKING:
    import torch

    from weightsync.vllm.apply.device_ops import DeviceOps

__all__ = ["twin_of"]

_GROUP = re.compile(r"[0-9a-f]{32}")


def twin_of(
    worker: Any, model: torch.nn.Module, name: str, ops: DeviceOps, ranks: int
) -> TwinTransform:
    """Return the twin of a worker.

    Args:
        worker: VLLM's.
        model: The one that it runs.
        name: `dp/pp/tp`.
        ops: Digests and exchanges its parameters.
        ranks: Workers of the engine on this host.
    """

    def start(group: str) -> LoaderStart:
        return LoaderStart(
            config=dump_config(_load_of(worker, model)),
            name=name,
            rank=int(worker.rank),
            local_rank=int(worker.local_rank),
            rendezvous=_rendezvous(group),
            room=ops.memory_stats().get("device_room"),
        )

    return TwinTransform(model, worker.device, ops, start, ranks)


def _load_of(worker: Any, model: torch.nn.Module) -> ModelLoad:
    target, *drafts = parts_of(model)
    config = worker.vllm_config
    parts = [PartLoad(config, config.model_config, "", target.names)]
    for draft in drafts:
        call = load_call(draft.module)
        if call is None:
            msg = "nobody saw how vLLM loaded the draft; start vLLM with VLLM_PLUGINS=weightsync"
            raise LoaderError(msg)
        parts.append(PartLoad(call.config, call.model_config, call.prefix, draft.names))
    return ModelLoad(tuple(parts), shared_modules(model))


def _rendezvous(group: str) -> str:
    """Return where the loaders of a group meet: nobody else can guess its name."""
    if not _GROUP.fullmatch(group):
        msg = f"{group!r} names no group of loaders"
        raise LoaderError(msg)
    return (Path(tempfile.gettempdir()) / f"weightsync-{group}").as_uri()
