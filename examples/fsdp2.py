"""An FSDP2 training loop in which every rank pushes the part of the weights that it holds.

    python examples/transformers_callback.py --init tiny
    weightsync-server --engine memory --model tiny ...
    torchrun --nproc-per-node 2 examples/fsdp2.py --address 127.0.0.1:50551 --apply

The ranks gather nothing: after each optimizer step every one calls `client.push(model, step=step)`,
and the server makes one version of what they send. With `--apply` rank 0 has the engine serve it.
The model is a tiny Llama with random weights; in `train` is all that a run of your own needs.
"""

from __future__ import annotations

import argparse

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from weightsync_client import Client

_TOKENS = 64


def make_model() -> LlamaForCausalLM:
    """Return the same model on every rank, as transformers_callback.py makes it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": _TOKENS, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads))


def make_rows(rank: int) -> torch.Tensor:
    """Return the texts that a rank learns."""
    return torch.randint(_TOKENS, (8, 16), generator=torch.Generator().manual_seed(rank))


def train(address: str, steps: int, device: torch.device, *, apply: bool) -> None:
    """Shard a model over all ranks, train it, and push every step."""
    rank = torch.distributed.get_rank()
    model, rows = make_model().to(device), make_rows(rank).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Client(address) as client:
        for step in range(1, steps + 1):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pushed = client.push(model, step=step, metadata={"step": step})
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}, version {pushed.version}", flush=True)
                if apply:
                    client.apply(pushed.version)


def main() -> None:
    """Join the ranks that torchrun has started, and train."""
    parser = argparse.ArgumentParser(description="Train with FSDP2 and push from every rank.")
    parser.add_argument("--address", default="127.0.0.1:50551", help="of weightsync-server")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--apply", action="store_true", help="have the engine serve each version")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.distributed.get_node_local_rank(0))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options.address, options.steps, device, apply=options.apply)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
