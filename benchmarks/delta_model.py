"""Tensors of a real 0.5 B model before and after a step of an Adam-like optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync.delta import Item

__all__ = ["Model", "floors"]

#: Deviation of the weights, and of the update before the learning rate.
_WEIGHTS, _UPDATE = 0.02, 0.2
_CHUNK = 1 << 22


def _shapes(layers: int, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of Qwen2-0.5B, in the order of its checkpoint."""
    hidden, inner, keys = 896, 4864, 128
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        for name, shape in (
            ("input_layernorm.weight", (hidden,)),
            ("mlp.down_proj.weight", (hidden, inner)),
            ("mlp.gate_proj.weight", (inner, hidden)),
            ("mlp.up_proj.weight", (inner, hidden)),
            ("post_attention_layernorm.weight", (hidden,)),
            ("self_attn.k_proj.bias", (keys,)),
            ("self_attn.k_proj.weight", (keys, hidden)),
            ("self_attn.o_proj.weight", (hidden, hidden)),
            ("self_attn.q_proj.bias", (hidden,)),
            ("self_attn.q_proj.weight", (hidden, hidden)),
            ("self_attn.v_proj.bias", (keys,)),
            ("self_attn.v_proj.weight", (keys, hidden)),
        ):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)


def _bf16(values: Any) -> Any:
    """Return the bits of float32 values rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def _step(rng: np.random.Generator, count: int, mean: float, rate: float) -> tuple[Any, Any]:
    """Return so many elements before and after a step."""
    master = rng.standard_normal(count, np.float32) * np.float32(_WEIGHTS if not mean else 0)
    master += np.float32(mean)
    update = rng.standard_normal(count, np.float32) * np.float32(_UPDATE * rate)
    return _bf16(master), _bf16(master - update)


def _rate(density: float) -> float:
    """Return the learning rate at which this share of elements changes."""
    low, high = 1e-9, 1e-2
    while high / low > 1.002:
        rate = math.sqrt(low * high)
        rng = np.random.default_rng(0)
        # In parts, because a step takes much more memory than its result.
        changed = [np.mean(np.not_equal(*_step(rng, _CHUNK, 0, rate))) for _ in range(4)]
        low, high = (rate, high) if np.mean(changed) < density else (low, rate)
    return math.sqrt(low * high)


@dataclass(frozen=True)
class Model:
    """All tensors, one after the other.

    Attributes:
        base: Their elements before.
        new: Their elements after.
        items: The tensors in these.
    """

    base: Any
    new: Any
    items: Sequence[Item]

    @classmethod
    def make(cls, layers: int, vocabulary: int) -> Model:
        """Return a model without a content; `change` gives it one."""
        shapes = list(_shapes(layers, vocabulary))
        total = sum(math.prod(shape) for _, shape in shapes)
        base, new = (np.empty(total, "<u2") for _ in "ab")
        items, at = [], 0
        for name, shape in shapes:
            end = at + math.prod(shape)
            before, after = (data[at:end].view(np.uint8) for data in (base, new))
            items.append(Item(name, "BF16", shape, before, after))
            at = end
        return cls(base, new, items)

    def change(self, density: float) -> float:
        """Make weights and one step, and return the share of elements that it changed."""
        rate = _rate(density)
        rng = np.random.default_rng(1)
        for item in self.items:
            before, after = (data.view("<u2") for data in (item.base, item.new))
            mean = float("norm" in item.name)
            for at in range(0, len(before), _CHUNK):
                part = slice(at, min(at + _CHUNK, len(before)))
                before[part], after[part] = _step(rng, part.stop - at, mean, rate)
        found = self.changed / len(self.base)
        if abs(found / density - 1) > 0.02:
            raise AssertionError(f"a density of {found} in place of {density}")
        return found

    @property
    def changed(self) -> int:
        """Elements that differ."""
        parts = range(0, len(self.base), _CHUNK)
        return sum(
            int(np.count_nonzero(self.base[at : at + _CHUNK] != self.new[at : at + _CHUNK]))
            for at in parts
        )


def _entropy(counts: Any) -> float:
    """Return the bits that all of a set need, by how often each kind occurs in it."""
    counts = counts[counts > 0].astype(float)
    return float((counts * np.log2(counts.sum() / counts)).sum()) if len(counts) else 0.0


def floors(model: Model) -> tuple[float, float]:
    """Return bytes per change: order 0, and order 0 given the exponent of the base."""
    total, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
    steps = np.zeros((256, 1 << 16), np.int64)
    for at in range(0, len(model.base), _CHUNK):
        base, new = model.base[at : at + _CHUNK], model.new[at : at + _CHUNK]
        exponent = base >> 7 & 0xFF
        total += np.bincount(exponent, minlength=256)
        where = np.flatnonzero(base != new)
        changed += np.bincount(exponent[where], minlength=256)
        np.add.at(steps, (exponent[where], new[where] - base[where]), 1)
    count = int(changed.sum())
    order_0 = _entropy(np.array([count, int(total.sum()) - count])) + _entropy(steps.sum(0))
    given = sum(
        _entropy(np.array([changed[e], total[e] - changed[e]])) + _entropy(steps[e])
        for e in range(256)
    )
    return order_0 / 8 / count, given / 8 / count
