"""What each rank of a trainer with flat parameters pushes, in processes of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from weightsync_client import Client, ClientError, PushOptions

RANKS = 2


class Block(torch.nn.Module):
    """Layers that two ranks cannot part along rows, a tied weight, and both kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(11, 11) for _ in range(3))
        self.norm = torch.nn.LayerNorm(11)
        self.embed = torch.nn.Linear(11, 5, bias=False)
        self.head = torch.nn.Linear(11, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 1 / 3))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        found: torch.Tensor = self.embed(x) + self.head(x)
        return found * self.get_buffer("scale").sum()


def _step(model: Any) -> None:
    """Train, so that what is pushed is what an optimizer has left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 11)).sum().backward()
    optimizer.step()


def _fsdp1(**options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(1)
    policy = ModuleWrapPolicy({torch.nn.Linear}) if options.pop("nested", False) else None
    block = Block()
    if policy is not None:
        # FSDP1 wants both ends of a tie in one unit.
        options["ignored_modules"] = [block.norm]
        del block.head
        block.head = torch.nn.Linear(11, 5)
    model = FullyShardedDataParallel(
        block, device_id=torch.device("cpu"), auto_wrap_policy=policy, **options
    )
    _step(model)
    return model


def _evaluated() -> FullyShardedDataParallel:
    # The root stays whole after a forward without a backward.
    model = _fsdp1(use_orig_params=True)
    with torch.no_grad():
        model(torch.ones(2, 11))
    return model


def _replaced() -> FullyShardedDataParallel:
    model = _fsdp1(use_orig_params=True)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    return model


FSDP1: dict[str, Callable[[], FullyShardedDataParallel]] = {
    "one_unit": _fsdp1,
    "nested": lambda: _fsdp1(nested=True),
    "original_parameters": lambda: _fsdp1(nested=True, use_orig_params=True),
    "evaluated": _evaluated,
    "replaced": _replaced,
    "not_sharded": lambda: _fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD),
    "mixed": lambda: _fsdp1(
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    ),
}


def _fsdp1_state(model: Any) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return dict(model.state_dict())


def _zero3(**options: Any) -> Any:
    import deepspeed  # type: ignore[import-not-found,unused-ignore] # not of this project

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(2)
    block = Block()
    sgd = torch.optim.SGD(block.parameters(), lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, **options},
    }
    engine, *_ = deepspeed.initialize(model=block, optimizer=sgd, config=config)
    engine.backward(engine(torch.ones(2, 11)).sum())
    engine.step()
    return engine


ZERO3: dict[str, Callable[[], Any]] = {
    "parted": lambda: _zero3(stage3_param_persistence_threshold=0),
    "persistent": lambda: _zero3(stage3_param_persistence_threshold=20),
    "offloaded": lambda: _zero3(offload_param={"device": "cpu"}),
}


def _zero3_state(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed  # type: ignore[import-not-found,unused-ignore] # not of this project

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


KINDS: dict[str, tuple[dict[str, Callable[[], Any]], Callable[[Any], dict[str, torch.Tensor]]]] = {
    "fsdp1": (FSDP1, _fsdp1_state),
    "zero3": (ZERO3, _zero3_state),
}


def run(rank: int, kind: str, folder: str, address: str) -> None:
    """Push every form, and write down what came of each, and from rank 0 what it should be."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ["DS_ACCELERATOR"] = "cpu"
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    forms, full_state = KINDS[kind]
    results: dict[str, list[object]] = {}
    with Client(address) as client:

        def push(name: str, source: Any, **options: Any) -> None:
            try:
                pushed = client.push(source, **options)
                facts = pushed.version, pushed.content_digest, pushed.sent_bytes
                results[name] = list(facts)
            except ClientError as error:
                results[name] = [str(error.reason), str(error)]

        for step, (name, make) in enumerate(forms.items()):
            model = make()
            state = full_state(model)
            if rank == 0:
                tensors = {key: tensor.clone() for key, tensor in state.items()}
                save_file(tensors, Path(folder, f"{name}.safetensors"))
            push(name, model, step=step, delta="never")
        # The last one again.
        for step, name in enumerate(("copied", "unchanged"), 50):
            push(name, model, step=step)
        push("old_epoch", model, step=100, epoch=1)
        scale = model.module.scale.clone()
        model.module.scale.add_(rank)
        push("differing", model, step=101)
        model.module.scale.copy_(scale)
        torch.distributed.destroy_process_group()
        options = PushOptions(writers=RANKS, writer=rank, idempotency_key=f"{kind}/alone")
        options["delta"] = "never"
        push("without_group", model, **options)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
