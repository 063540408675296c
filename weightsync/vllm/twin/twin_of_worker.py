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

#: What a loader takes of a CUDA device beside its tensors, bytes. With moe30 on an H200 there were
#: 0.9 GB beside the arena at rest, and 1.3 beside twice that at the peak, the rank's own in it.
_CONTEXT = 1 << 30
_GROUP = re.compile(r"[0-9a-f]{32}")


def twin_of(
    worker: Any,
    model: torch.nn.Module,
    name: str,
    ops: DeviceOps,
    ranks: int,
    host_room: int | None = None,
) -> TwinTransform:
    """Return the twin of a worker.

    Args:
        worker: VLLM's.
        model: The one that it runs.
        name: `dp/pp/tp`.
        ops: Digests and exchanges its parameters.
        ranks: Workers of the engine on this host.
        host_room: How many bytes a loader may take where there is no device; None: it is not
            bounded.
    """

    def room() -> int | None:
        given = ops.memory_stats().get("device_room")
        return host_room if given is None else max(0, given - _CONTEXT)

    def start(group: str) -> LoaderStart:
        return LoaderStart(
            config=dump_config(_load_of(worker, model)),
            name=name,
            rank=int(worker.rank),
            local_rank=int(worker.local_rank),
            device=str(worker.device),
            rendezvous=_rendezvous(group, _replica(worker, name)),
            room=room(),
        )

    return TwinTransform(model, worker.device, ops, start, ranks, room, _why_fixed(worker))


def _why_fixed(worker: Any) -> str:
    if getattr(worker.vllm_config.model_config, "enforce_eager", False):
        return ""
    return (
        "vLLM may have compiled or captured what is called with them; start vLLM with "
        "--enforce-eager, or restart it to serve this version"
    )


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


def _replica(worker: Any, name: str) -> str:
    """Return what tells the loaders of a replica from others'; "": all meet, as their ranks do."""
    together = getattr(worker.parallel_config, "data_parallel_size", 1) > 1
    return "" if together else f"-{name.partition('/')[0]}"


def _rendezvous(group: str, replica: str) -> str:
    """Return where the loaders of a group meet: nobody else can guess its name."""
    if not _GROUP.fullmatch(group):
        msg = f"{group!r} names no group of loaders"
        raise LoaderError(msg)
    return (Path(tempfile.gettempdir()) / f"weightsync-{group}{replica}").as_uri()
