"""Ranks of torchtitan's RL, each of trainer and generator, in processes of their own.

The order of calls is that of torchtitan's `WeightSyncManager`; see the test.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from weightsync_client import ClientError
from weightsync_client.integrations import WeightSyncStore

RANKS, STEPS = 2, 3
KEY = "model_state_dict"


class Model(torch.nn.Module):
    """Of which a norm cannot be sharded evenly, and a buffer is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6, bias=False)
        self.norm = torch.nn.LayerNorm(3)
        self.register_buffer("bias_E", torch.arange(5.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return something that every parameter but the norm's has a part in."""
        out: torch.Tensor = self.down(torch.relu(self.up(rows)))
        return out


def _trainer() -> Model:
    torch.manual_seed(1)
    model = Model()
    fully_shard(model.up)
    fully_shard(model)
    return model


def _generator() -> Model:
    torch.manual_seed(2)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (RANKS,))
    model = Model()
    parallelize_module(model, mesh, plan)
    return model


def _whole(model: Model) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


def _alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


async def _pull(store: WeightSyncStore, model: Model) -> None:
    state = model.state_dict()
    await store.get_state_dict(KEY, user_state_dict=state, strict=False, direct_rdma=False)
    model.load_state_dict(state, strict=False)


async def _train(store: WeightSyncStore, found: dict[str, Any]) -> None:
    trainer, generator = _trainer(), _generator()
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    rows = torch.randn(4, 6)

    def forward_backward() -> None:
        trainer(rows).square().mean().backward()

    # As training begins.
    await store.put_state_dict(trainer.state_dict(), KEY, direct_rdma=False)
    await _pull(store, generator)
    found["equal"] = [_alike(_whole(generator), _whole(trainer))]
    put = asyncio.create_task(asyncio.sleep(0))
    for _ in range(STEPS):
        # While the weights of the step before are still on their way.
        forward_backward()
        await put
        optimizer.step()
        optimizer.zero_grad()
        state = trainer.state_dict()
        put = asyncio.create_task(store.put_state_dict(state, KEY, direct_rdma=False))
        await put
        await _pull(store, generator)
        found["equal"].append(_alike(_whole(generator), _whole(trainer)))
    found["whole"] = {name: tensor.tolist() for name, tensor in _whole(trainer).items()}


async def _failing(store: WeightSyncStore, rank: int, found: dict[str, Any]) -> None:
    async def outcome(name: str, call: Any) -> None:
        try:
            await call
            found[name] = ""
        except ClientError as error:
            found[name] = f"{error.reason}: {error}"

    state = {"x": torch.full((3,), float(rank))}
    await outcome("differs", store.put_state_dict(state, "other"))
    await outcome("again", store.put_state_dict({"x": torch.zeros(3)}, "other"))
    await outcome("nothing", store.get_state_dict("none", {"x": torch.zeros(3)}))
    await outcome("shape", store.get_state_dict("other", {"x": torch.zeros(4)}))
    await outcome("dtype", store.get_state_dict("other", {"x": torch.zeros(3).half()}))
    await outcome("names", store.get_state_dict("other", {"y": torch.zeros(3)}))
    await outcome("rdma", store.put_state_dict({"x": torch.zeros(3)}, "other", direct_rdma=True))
    more = {"x": torch.ones(3), "y": torch.ones(2)}
    await outcome("lenient", store.get_state_dict("other", more, strict=False))
    found["kept"] = [more["x"].tolist(), more["y"].tolist()]


def run(rank: int, folder: str, address: str) -> None:
    """Train, pull, and write down what came of it."""
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    store = WeightSyncStore(address, push={"metadata": {"team": "red"}})
    asyncio.run(_train(store, found))
    asyncio.run(_failing(store, rank, found))
    store.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
