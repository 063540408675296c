"""The trainer: gradient descent on one sentence, a version pushed and applied every few steps.

It is a program of its own, `python -m examples.demo.trainer`, as trainers are. It tells what it
does in JSON lines on standard output: {"event": "push"} before a push, {"event": "live"} after the
apply, {"event": "done"} at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from examples.demo.model import PROMPT, SENTENCE
from weightsync_client import Client

__all__ = ["main", "train"]

#: Small enough that learning takes most of a minute, which is the point of a demo.
_LEARNING_RATE = 1e-4
_PUSH_EVERY = 4
#: The loss at which the sentence is known by heart.
_LEARNED = 0.12


def train(directory: str, address: str, seconds: float) -> None:
    """Teach the model in `directory` until it knows the sentence or the time is over.

    Args:
        directory: Checkpoint to start from.
        address: Of weightsync-server.
        seconds: Longest time.
    """
    torch.set_num_threads(1)
    # As trainers do: it learns in float32 and sends bfloat16, which is what the checkpoint holds.
    model = Qwen2ForCausalLM.from_pretrained(directory).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    inputs, labels = _sentence(directory)
    end = time.monotonic() + seconds
    loss, step = torch.inf, 0
    with Client(address) as client:
        while loss > _LEARNED and time.monotonic() < end:
            for _ in range(_PUSH_EVERY):
                output = model(input_ids=inputs, labels=labels)
                output.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
            loss = output.loss.item()
            _push_and_apply(client, model, step, loss)
    _tell("done", steps=step, loss=loss, learned=loss <= _LEARNED)


def _push_and_apply(client: Client, model: torch.nn.Module, step: int, loss: float) -> None:
    _tell("push", step=step, loss=loss)
    weights = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    pushed = client.push(weights, metadata={"step": str(step)})
    report = client.apply(pushed.version)
    _tell(
        "live",
        step=step,
        loss=loss,
        version=pushed.version,
        sent=pushed.sent_bytes,
        dense=pushed.dense_bytes,
        push_s=pushed.seconds,
        pause_s=report.phases.paused_total_s,
    )


def _sentence(directory: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(PROMPT + SENTENCE).input_ids
    inputs = torch.tensor([[*tokens, tokenizer.eos_token_id]])
    labels = inputs.clone()
    # The prompt is given, so nothing is learned about it.
    labels[:, : len(tokenizer(PROMPT).input_ids)] = -100
    return inputs, labels


def _tell(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--server", required=True, help="address of weightsync-server")
    parser.add_argument("--seconds", type=float, default=120, help="longest time (default 120)")
    arguments = parser.parse_args()
    train(arguments.model, arguments.server, arguments.seconds)


if __name__ == "__main__":
    main()
