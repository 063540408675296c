"""TRL's AsyncGRPOTrainer with a vLLM that serves each of its steps.

    python examples/trl_async_grpo.py --init tiny
    WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 examples/add_to_vllm.sh --model tiny --dtype float32
    python examples/trl_async_grpo.py --model tiny --steps 12

The model is a tiny Qwen2 with random weights that learns to answer with digits, so this needs
neither a GPU nor a download. In `train` is all that a run of your own needs.

TRL 1.16 asks for a GPU in two places: `tree_attention` of packing.py calls FlashAttention 3, and
`get_peak_flops_per_device` asks for the GPU's name, for a figure in its logs. Without a GPU
`replace_what_is_absent` has PyTorch compute the same attention, and leaves the figure out.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from itertools import pairwise
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

from weightsync_client.integrations import WeightSyncTransfer

_PAD, _EOS = "<pad>", "<eos>"
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_QUESTIONS = ("how many", "how much", "how far", "how old")


def make_model(folder: str) -> None:
    """Write a checkpoint whose tokens are letters and digits."""
    tokens = {token: index for index, token in enumerate((_PAD, _EOS, " ", *_LETTERS))}
    raw = Tokenizer(models.BPE(tokens, []))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=_PAD, eos_token=_EOS)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    tokenizer.response_template = {"fields": {"content": {"content": "text"}}}
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokens), "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(**sizes, **heads, **ends, max_position_embeddings=256)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def share_of_digits(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Reward each answer by how much of it is digits."""
    answers = [completion[0]["content"] for completion in completions]
    return [sum(map(str.isdigit, answer)) / max(len(answer), 1) for answer in answers]


class Report(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Prints what each step earned, and which version vLLM serves after it."""

    def __init__(self, transfer: WeightSyncTransfer) -> None:
        self._transfer = transfer

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
        """Print a line."""
        if "reward" in logs and (last := self._transfer.last):
            step = f"step {state.global_step}: reward {logs['reward']:.3f}"
            print(f"{step}, version {last.push.version}", flush=True)


def train(model: str, vllm: str, server: str, steps: int, folder: str) -> AsyncGRPOTrainer:
    """Train, and have vLLM serve each step."""
    transfer = WeightSyncTransfer(server, apply={"pause": "keep"})
    settings = AsyncGRPOConfig(folder, vllm_server_base_url=vllm, max_steps=steps, **_tiny())
    trainer = AsyncGRPOTrainer(
        model,
        reward_funcs=share_of_digits,
        args=settings,
        train_dataset=make_questions(),
        callbacks=[Report(transfer)],
        weight_transfer=transfer,
    )
    trainer.train()
    return trainer


def make_questions() -> Dataset:
    """Return what is asked."""
    asked = [[{"role": "user", "content": question}] for question in _QUESTIONS]
    return Dataset.from_dict({"prompt": asked})


def _tiny() -> dict[str, Any]:
    """Return settings with which a tiny model learns within few steps."""
    return {
        "num_generations": 8,
        "max_completion_length": 12,
        "token_budget": 512,
        "max_inflight_tasks": 32,
        "max_staleness": 1,
        "learning_rate": 3e-3,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": [],
    }


# What TRL needs a GPU for.


def replace_what_is_absent() -> None:
    """Have TRL do without a GPU, or without `kernels`, which gets FlashAttention from the Hub."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        # As where it knows no peak performance of a GPU: its logs then lack the share of that.
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    if not has_gpu or importlib.util.find_spec("kernels") is None:
        packing.tree_attention = _tree_attention


def _tree_attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Let each token of a packed row see those before it on its own way from the root."""
    length = query.shape[2]
    seen = torch.zeros(length, length, dtype=torch.bool, device=query.device)
    bounds = (pairwise(ends.tolist()) for ends in (tree_cu_seqlens_q, tree_cu_seqlens_k))
    for (first, end), (path, path_end) in zip(*bounds, strict=True):
        ones = seen.new_ones(end - first, path_end - path)
        # The last token of a segment sees all of its path, each before it one less.
        seen[first:end, tree_kv_index[path:path_end]] = ones.tril(path_end - path - (end - first))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def main() -> None:
    """Write the first checkpoint for vLLM, or train."""
    parser = argparse.ArgumentParser(description="Train a tiny model with TRL, and serve it.")
    parser.add_argument("--init", metavar="DIR", help="write the checkpoint for vLLM, no more")
    parser.add_argument("--model", default="tiny", help="as vLLM was given it (default tiny)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default 12)")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000", help="address of vLLM")
    parser.add_argument("--server", default="127.0.0.1:50551", help="address of weightsync-server")
    parser.add_argument("--save", metavar="DIR", help="write the trained model")
    options = parser.parse_args()
    if options.init:
        make_model(options.init)
        return
    replace_what_is_absent()
    with tempfile.TemporaryDirectory() as folder:
        trainer = train(options.model, options.vllm, options.server, options.steps, folder)
    if options.save:
        trainer.save_model(options.save)


if __name__ == "__main__":
    main()
