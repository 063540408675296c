"""A rank of transformers' own Trainer with FSDP2 on the CPU, run by torchrun for a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from examples.transformers_callback import make_model, make_rows
from weightsync_client import Client, ClientError, Retry
from weightsync_client.integrations import WeightSyncCallback

RANKS, STEPS = 2, 5

#: A server that is away is asked once.
_RETRY = Retry(attempts=1)


class _Gather(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Writes the whole model of every step, and ends a training early if asked."""

    def __init__(self, folder: Path, stop_at: int) -> None:
        self._folder, self._stop_at = folder, stop_at

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = get_model_state_dict(model, options=options)
        if state.is_world_process_zero:
            self._folder.mkdir(exist_ok=True)
            tensors = {name: tensor.clone() for name, tensor in whole.items()}
            save_file(tensors, self._folder / f"{state.global_step}.safetensors")
        if state.global_step == self._stop_at:
            control.should_training_stop = True


def _sharded_by_transformers(folder: Path, **settings: Any) -> Trainer:
    shard = DistributedConfig(fsdp_size=RANKS)
    model = LlamaForCausalLM.from_pretrained(folder / "tiny", distributed_config=shard)
    assert type(next(model.parameters())).__name__ == "DTensor"
    return _trainer(model, folder, settings)


def _sharded_by_accelerate(folder: Path, **settings: Any) -> Trainer:
    from accelerate.utils import (  # type: ignore[import-untyped] # it has no types
        DistributedType,
        FullyShardedDataParallelPlugin,
    )

    wrapped = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    settings |= {"fsdp": True, "fsdp_config": {"version": 2, **wrapped}}
    trainer = _trainer(make_model(), folder, settings)
    # accelerate 1.15 drops the plugin that it is given where all devices are CPUs.
    assert not trainer.is_fsdp_enabled
    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.is_fsdp_enabled = True
    return trainer


def _trainer(model: Any, folder: Path, more: dict[str, Any]) -> Trainer:
    settings: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(folder / "out"), **settings | more)
    rows = make_rows(16)
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])


class _Rank:
    """Runs trainings one after the other, and keeps what came of them on this rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: dict[str, Any] = {}

    def train(
        self, name: str, trainer: Trainer, callback: WeightSyncCallback, stop_at: int = 0
    ) -> None:
        trainer.add_callback(_Gather(self._folder / name, stop_at))
        trainer.add_callback(callback)
        error = ""
        try:
            trainer.train()
        except ClientError as raised:
            error = "; ".join([str(raised.reason), str(raised), *getattr(raised, "__notes__", ())])
        state = trainer.state
        pushed = [entry for entry in state.log_history if "weightsync/version" in entry]
        failed = [entry for entry in state.log_history if "weightsync/failed_steps" in entry]
        self.found[name] = {
            "steps": state.global_step,
            "error": error,
            "pushed": [[entry["step"], entry["weightsync/version"]] for entry in pushed],
            "sent": [entry["weightsync/sent_bytes"] for entry in pushed],
            "failed": [entry["step"] for entry in failed],
        }


def main(folder: Path, address: str, without_engine: str) -> None:
    """Run all trainings, and write down what came of each."""
    rank = _Rank(folder)
    make, callback = _sharded_by_transformers, WeightSyncCallback
    run: dict[str, Any] = {"every": 2, "apply": True, "run_id": "run"}
    rank.train("transformers", make(folder), callback(address, **run))
    number = torch.distributed.get_rank()
    # The last push comes after an evaluation, when FSDP2 shows parameters whole. The same run:
    # its steps are repeated.
    rank.train("stopped", make(folder), callback(address, **run), stop_at=3)

    here = address if number == 0 else f"unix:{folder}/nobody.sock"
    rank.train("away", make(folder), callback(here, retry=_RETRY))
    model = Client(address).model if number == 0 else "other"
    rank.train("unlike", make(folder), callback(address, model=model))
    rank.train("not_applied", make(folder), callback(without_engine, every=2, apply=True))
    logged = callback(without_engine, every=2, apply=True, on_error="log")
    rank.train("logged", make(folder), logged)
    # The last: it changes what accelerate knows of this process.
    rank.train("accelerate", _sharded_by_accelerate(folder), callback(address, **run))
    (folder / f"{number}.json").write_text(json.dumps(rank.found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
