"""Small models whose every part tells in what they compute, and checkpoints of them that are wrong.

Random weights are enough where every layer adds as much as the one before. How far a fault is from
the floor of a real model, one that has learned some text shows; it takes minutes to make.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.models import checkpoint_config, save_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Weights = dict[str, torch.Tensor]

__all__ = ["FAULTS", "Trained", "faulty"]

_SIZES = {"hidden": 128, "layers": 4}
_LENGTH, _BATCH = 128, 16


class Trained:
    """A model of transformers, which has learned this project's documentation or nothing.

    Args:
        arch: `qwen3`, whose head is its embedding, or `qwen3_moe`, with 8 experts and a head.
        folder: Where its tokenizer goes.
        steps: Steps of training; with 150 it has learned enough. 0: its weights are random.

    Attributes:
        arch: See above.
        model: In float32 and evaluation mode.
        text: Token ids of what it has not learned.
    """

    def __init__(self, arch: str, folder: Path, steps: int = 0) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.arch = arch
        save_tokenizer(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
        text = "\n".join(page.read_text() for page in pages)[:400_000]
        ids = torch.tensor(tokenizer(text)["input_ids"])
        cut = len(ids) * 9 // 10
        self.text: list[int] = ids[cut:].tolist()
        torch.manual_seed(5)
        self.model: Any = AutoModelForCausalLM.from_config(
            checkpoint_config(arch, tied=arch == "qwen3", **_SIZES)
        )
        if steps:
            self._learn(ids[:cut], steps)
        else:
            self._randomise()
        self.model.eval()

    def _randomise(self) -> None:
        import torch

        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                noise = torch.randn(parameter.shape, generator=draw)
                if parameter.dim() == 1:
                    # Sharper attention makes more of what bfloat16 rounds.
                    middle = 0.5 if "_norm" in name and "self_attn" in name else 1.0
                    parameter.copy_(middle + 0.1 * noise)
                elif "embed" in name or "lm_head" in name:
                    parameter.copy_(0.1 * noise)
                else:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)

    def _learn(self, ids: torch.Tensor, steps: int) -> None:
        import torch

        adam = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)
        draw = torch.Generator().manual_seed(6)
        for _ in range(steps):
            starts = torch.randint(len(ids) - _LENGTH, (_BATCH,), generator=draw)
            batch = torch.stack([ids[start : start + _LENGTH] for start in starts.tolist()])
            self.loss = self.model(batch, labels=batch).loss
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()

    def step(self, rate: float) -> None:
        """Change every weight by so much of its own deviation, as a step of training may."""
        import torch

        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=draw)
                parameter.add_(noise * rate)

    def sequences(self, count: int, length: int) -> list[list[int]]:
        """Return pieces of text that it has not learned."""
        return [self.text[at * length : (at + 1) * length] for at in range(count)]

    def save(self, folder: Path, dtype: str = "bfloat16") -> Path:
        """Write a checkpoint that vLLM loads."""
        import torch
        from transformers import AutoModelForCausalLM

        copy = AutoModelForCausalLM.from_config(self.model.config)
        copy.load_state_dict(self.model.state_dict())
        copy.to(getattr(torch, dtype)).save_pretrained(folder)
        save_tokenizer(folder)
        return folder


def faulty(source: Path, target: Path, change: Callable[[Weights], None]) -> Path:
    """Copy a checkpoint with its weights changed."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    weights = load_file(file)
    change(weights)
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, file)
    index = target / "model.safetensors.index.json"
    assert not index.exists(), json.loads(index.read_text())
    return target


def _swap(weights: Weights, first: str, second: str) -> None:
    weights[first], weights[second] = weights[second].clone(), weights[first].clone()


def _layer(at: int) -> str:
    return f"model.layers.{at}."


def _gate_up(weights: Weights) -> None:
    mlp = _layer(1) + "mlp."
    for name in [name for name in weights if name.startswith(mlp) and "gate_proj" in name]:
        _swap(weights, name, name.replace("gate_proj", "up_proj"))


def _layers(weights: Weights) -> None:
    for name in [name for name in weights if name.startswith(_layer(1))]:
        _swap(weights, name, name.replace(_layer(1), _layer(2)))


def _rotary(weights: Weights) -> None:
    """Order the rows of each head as the other convention of rotary embeddings has them."""
    name = _layer(1) + "self_attn.q_proj.weight"
    heads, width = 4, weights[name].shape[0] // 4
    rows = weights[name].reshape(heads, 2, width // 2, -1).transpose(1, 2)
    weights[name] = rows.reshape(weights[name].shape).clone()


def _transposed(weights: Weights) -> None:
    name = _layer(1) + "self_attn.o_proj.weight"
    weights[name] = weights[name].t().clone()


def _keys_values(weights: Weights) -> None:
    attention = _layer(1) + "self_attn."
    _swap(weights, attention + "k_proj.weight", attention + "v_proj.weight")


def _doubled(weights: Weights) -> None:
    weights[_layer(1) + "self_attn.o_proj.weight"] *= 2


def _embedding(weights: Weights) -> None:
    name = "model.embed_tokens.weight"
    weights[name] = weights[name].roll(1, 0)


def _not_a_number(weights: Weights) -> None:
    weights[_layer(1) + "self_attn.o_proj.weight"][3, 5] = float("nan")


def _two_experts(weights: Weights) -> None:
    one = _layer(1) + "mlp.experts.0."
    for name in [name for name in weights if name.startswith(one)]:
        _swap(weights, name, name.replace("experts.0.", "experts.1."))


def _router(weights: Weights) -> None:
    name = _layer(1) + "mlp.gate.weight"
    weights[name] = weights[name].roll(1, 0)


def _wrongly_tied(weights: Weights) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


_BOTH: dict[str, Callable[[Weights], None]] = {
    "gate and up swapped": _gate_up,
    "two layers swapped": _layers,
    "rows in the order of the other rotary embedding": _rotary,
    "transposed": _transposed,
    "keys and values swapped": _keys_values,
    "one matrix doubled": _doubled,
    "embedding off by one": _embedding,
    "one NaN": _not_a_number,
}

#: What an export can do wrong, by architecture.
FAULTS: dict[str, dict[str, Callable[[Weights], None]]] = {
    "qwen3": _BOTH,
    "qwen3_moe": {
        **_BOTH,
        "two experts swapped": _two_experts,
        "rows of the router": _router,
        "wrongly tied": _wrongly_tied,
    },
}
