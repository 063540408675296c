"""Models that vLLM has loaded in this process as one of its ranks does, without an engine.

For programs of their own: vLLM's environment and our plugin change a process for good.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import ShardEntry
from weightsync.vllm.plan.live_params import view_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.model.manifest import Layout
    from weightsync.vllm.plan.live_params import LiveParameters
    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = ["Loader", "files_of", "layout_of", "same", "tensors_of", "unlike", "write"]


class Loader:
    """Loads checkpoints as rank `rank` of a group that is told where it meets.

    Args:
        rendezvous: A file that does not exist, the same for all ranks.
        rank: This one.
        ranks: How many there are.
        flags: More of vLLM's engine arguments.
    """

    def __init__(self, rendezvous: Path, rank: int = 0, ranks: int = 1, **flags: Any) -> None:
        # As vLLM's own worker for the CPU has it.
        torch.accelerator.empty_cache = lambda: None
        os.environ.setdefault("VLLM_DIST_IDENT", rendezvous.name)
        from weightsync.vllm import plugin

        plugin.register()
        self._rendezvous = rendezvous
        self._rank, self._ranks, self._flags = rank, ranks, flags

    def config(self, folder: Path) -> Any:
        """Return vLLM's configuration of an engine that serves a checkpoint."""
        from vllm.engine.arg_utils import EngineArgs

        arguments: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": True, **self._flags}
        if self._ranks > 1:
            arguments |= {"tensor_parallel_size": self._ranks}
            arguments |= {"distributed_executor_backend": "mp"}
        return EngineArgs(model=str(folder), **arguments).create_engine_config()

    def load(self, config: Any) -> torch.nn.Module:
        """Return this rank's model, loaded by vLLM; call it under `set_current_vllm_config`."""
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.model_executor.model_loader import get_model

        if not torch.distributed.is_initialized():
            place = f"file://{self._rendezvous}"
            init_distributed_environment(self._ranks, self._rank, place, self._rank, "gloo")
            initialize_model_parallel(self._ranks)
        model: torch.nn.Module = get_model(vllm_config=config)
        return model


def files_of(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, in the order of its shards."""
    return sorted(folder.glob("*.safetensors"))


def layout_of(folder: Path) -> Layout:
    """Return the layout of a checkpoint."""
    shards, tensors = [], []
    for index, file in enumerate(files_of(folder)):
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        shards.append(ShardEntry(file.name, len(raw), size))
        tensors.append(check_shard(shards[-1], parse_header(raw[8 : 8 + size], index)))
    return check_version(shards, tensors)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint."""
    return {name: tensor for file in files_of(folder) for name, tensor in load_file(file).items()}


def unlike(plan: LoadPlan, live: LiveParameters, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the parameters that are no copies of a checkpoint: what the proof at start finds."""
    return sorted(
        {
            item.param
            for item in plan.slices
            if not same(
                view_of(live.tensor(item.param), item.target),
                view_of(tensors[item.tensor], item.source),
            )
        }
    )


def write(plan: LoadPlan, live: LiveParameters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make the copies of a plan."""
    for item in plan.slices:
        source = view_of(tensors[item.tensor], item.source)
        view_of(live.tensor(item.param), item.target).copy_(source)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have one dtype and the same bytes in the same places."""
    # Not by value: not every dtype can be compared, and no NaN is equal to itself.
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )
