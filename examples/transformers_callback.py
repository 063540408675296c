"""A run of transformers' Trainer whose model is pushed, and applied, while it trains.

    python examples/transformers_callback.py --init tiny
    weightsync-server --engine memory --model tiny ...
    python examples/transformers_callback.py --steps 6 --every 2
    torchrun --nproc-per-node 2 examples/transformers_callback.py --shard tiny

The model is a tiny Llama with random weights, so this needs neither a GPU nor a download; the
engine `memory` takes weights as vLLM does and generates nothing. With `--shard` each rank has a
part of the model (FSDP2), and pushes that. In `train` is all that a run of your own needs.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from weightsync_client.integrations import WeightSyncCallback

_TOKENS = 64


def make_model() -> LlamaForCausalLM:
    """Return the same model each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": _TOKENS, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads))


def load_shard(folder: str) -> LlamaForCausalLM:
    """Return the model of a checkpoint, of which each rank of torchrun has a part."""
    from transformers.distributed import DistributedConfig

    ranks = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=ranks)


def make_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return random texts."""
    rows = torch.randint(_TOKENS, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model: LlamaForCausalLM, server: str, steps: int, every: int, folder: str) -> Trainer:
    """Train, and have the engine serve each pushed step."""
    arguments = TrainingArguments(
        folder, max_steps=steps, logging_steps=every, save_strategy="no", use_cpu=True
    )
    arguments.disable_tqdm = True
    callback = WeightSyncCallback(server, every=every, apply=True)
    trainer = Trainer(model, arguments, train_dataset=make_rows(64), callbacks=[callback])
    trainer.train()
    return trainer


def main() -> None:
    """Write the first checkpoint for the engine, or train."""
    parser = argparse.ArgumentParser(description="Train a tiny model and push it as it learns.")
    parser.add_argument(
        "--init", metavar="DIR", help="write the checkpoint for the engine, no more"
    )
    parser.add_argument("--shard", metavar="DIR", help="train that checkpoint over all ranks")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps (default 6)")
    parser.add_argument("--every", type=int, default=2, help="steps between pushes (default 2)")
    parser.add_argument("--server", default="127.0.0.1:50551", help="address of weightsync-server")
    options = parser.parse_args()
    if options.init:
        make_model().save_pretrained(options.init)
        return
    model = load_shard(options.shard) if options.shard else make_model()
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(model, options.server, options.steps, options.every, folder)
    for entry in trainer.state.log_history:
        if "weightsync/version" in entry:
            paused_ms = entry["weightsync/paused_seconds"] * 1000
            print(
                f"step {entry['step']}: version {entry['weightsync/version']}, "
                f"pushed in {entry['weightsync/push_seconds']:.2f} s, paused {paused_ms:.1f} ms"
            )


if __name__ == "__main__":
    main()
