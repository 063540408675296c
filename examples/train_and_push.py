"""A PyTorch training loop that pushes its weights every few steps.

    weightsync-server ...
    python examples/train_and_push.py --model DIR --text "What the model shall say."

`train` is all that a training loop needs; the rest reads the command line. With
`client.push_async(...)` the loop goes on while the bytes travel: wait for `handle.source_free`
before the next `optimizer.step()`.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from weightsync_client import Client


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor], steps: int, server: str) -> None:
    """Train on one batch and push a version every fifth step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Client(server) as client:
        for step in range(1, steps + 1):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                pushed = client.push(model.state_dict(), metadata={"step": str(step)})
                print(f"step {step}: loss {loss.item():.4f}, version {pushed.version}", flush=True)


def main() -> None:
    """Load a model and train it on a text."""
    parser = argparse.ArgumentParser(description="Train on a text and push every fifth step.")
    parser.add_argument("--model", required=True, help="checkpoint directory, as vLLM serves it")
    parser.add_argument("--text", required=True, help="what to learn")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--server", default="127.0.0.1:50551", help="address of weightsync-server")
    options = parser.parse_args()
    tokens = AutoTokenizer.from_pretrained(options.model)(options.text, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(options.model)
    batch = {"input_ids": tokens.input_ids, "labels": tokens.input_ids}
    train(model, batch, options.steps, options.server)


if __name__ == "__main__":
    main()
