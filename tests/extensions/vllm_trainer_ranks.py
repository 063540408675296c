"""A rank of a trainer with FSDP2 that sends its weights as vLLM's trainers do."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from weightsync_client import ClientError
from weightsync_client.integrations import WeightSyncTrainerInitInfo

__all__ = ["RANKS", "make_model", "run"]

RANKS = 2


def make_model(step: int) -> torch.nn.Sequential:
    """Return the model of a step, which all ranks hold parts of; the same in every process."""
    torch.manual_seed(step)
    return torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3, bias=False))


def run(rank: int, folder: str, address: str) -> None:
    """Send steps 0 and 2, and in between one that cannot be; write down what came of each."""
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    found: list[object] = []
    for step in range(3):
        model = make_model(step)
        if step == 1:
            # Of a model that the engine does not have.
            model.append(torch.nn.Linear(3, 3))
        trainer = WeightTransferTrainerFactory.trainer_init(
            WeightSyncTrainerInitInfo(address, rank=rank),
            client=None,
            source=ModuleSource(fully_shard(model)),
        )
        try:
            trainer.send_weights()
            found.append(trainer.last and trainer.last.push.version)
        except ClientError as error:
            found.append(str(error.reason))
        trainer.shutdown()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
