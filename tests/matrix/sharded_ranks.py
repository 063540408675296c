"""What each rank of a sharded trainer pushes, in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from weightsync_client import Client, ClientError

RANKS = 4


class Block(torch.nn.Module):
    """Two layers, a norm that small meshes cannot shard evenly, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(12, 30)
        self.down = torch.nn.Linear(30, 12, bias=False)
        self.norm = torch.nn.LayerNorm(3)
        self.head = torch.nn.Linear(12, 7, dtype=torch.bfloat16)
        self.register_buffer("steps", torch.tensor(5))


def whole_model(seed: int) -> Block:
    """Return the model that all ranks hold parts of; the same in every process."""
    torch.manual_seed(seed)
    return Block()


def _fsdp2() -> object:
    model = whole_model(1)
    fully_shard(model.up)
    return fully_shard(model)


def _hsdp() -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return fully_shard(whole_model(2), mesh=mesh)


def _tensor_parallel() -> object:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(whole_model(3), mesh["tensor"], plan)
    return fully_shard(model, mesh=mesh["data"])


def _by_hand() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = whole_model(4).state_dict()
    state = dict(whole)
    state["up.weight"] = distribute_tensor(whole["up.weight"], mesh, [Shard(0), Shard(1)])
    state["down.weight"] = distribute_tensor(whole["down.weight"], mesh, [Shard(1), Replicate()])
    state["norm.weight"] = distribute_tensor(whole["norm.weight"], mesh, [Shard(0), Shard(0)])
    return state


def _differing(rank: int) -> dict[str, torch.Tensor]:
    state = _by_hand()
    if rank == 2:
        state["norm.bias"] = torch.full((3,), 9.0)
    return state


#: What is pushed, and the seed of the model that it is.
FORMS: dict[str, tuple[Callable[[], object], int]] = {
    "fsdp2": (_fsdp2, 1),
    "hsdp": (_hsdp, 2),
    "tensor_parallel": (_tensor_parallel, 3),
    "by_hand": (_by_hand, 4),
}


#: What a partial push has: a matrix, a vector that meshes do not cut evenly, and a number.
TRAINED = ("down.weight", "norm.weight", "steps")


def run(rank: int, folder: str, address: str, narrow_address: str) -> None:
    """Push every form to two servers, and write down what came of each.

    Args:
        rank: Its number.
        folder: Where it is written down.
        address: Of a server without an engine.
        narrow_address: Of one whose engine has all floats as BF16.
    """
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    results: dict[str, list[object]] = {}
    with Client(address) as client:
        for step, (name, (make, _)) in enumerate(FORMS.items()):
            made: Any = make()
            result = client.push(made, step=step)
            facts = result.version, result.content_digest, result.sent_bytes, result.way
            results[name] = list(facts)
            # The base is what this client has committed last, as on every rank.
            state = made if isinstance(made, dict) else made.state_dict()
            part = {key: 2 * state[key] for key in TRAINED}
            result = client.push(part, step=200 + step, partial=True)
            results[f"{name}_part"] = [result.content_digest, result.base_version, result.way]
        for name, state, step in (
            ("differing", _differing(rank), 100),
            ("again", _by_hand(), 100),
            ("twice", _by_hand(), 100),
        ):
            try:
                pushed = client.push(state, step=step)
                results[name] = [pushed.version, pushed.content_digest, pushed.sent_bytes]
            except ClientError as error:
                results[name] = [str(error.reason), str(error)]
    with Client(narrow_address) as client:
        for step, (name, (make, _)) in enumerate(FORMS.items()):
            made = make()
            result = client.push(made, step=step)
            results[f"{name}_cast"] = [result.content_digest, result.sent_bytes, result.cast]
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
