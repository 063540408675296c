"""The tensors of a small model, and what a step of an optimizer does to them."""

from __future__ import annotations

import torch

from weightsync.model.digest import content_digest, tensor_digest

__all__ = ["Tensors", "digest_of", "model", "step"]

Tensors = dict[str, torch.Tensor]


def model(seed: int = 0, count: int = 4, elements: int = 60_000) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.weight": torch.randn(elements + i, generator=generator).to(torch.bfloat16)
        for i in range(count)
    }


def step(tensors: Tensors, seed: int, share: float = 0.01) -> None:
    """Move a share of all elements by one ulp, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        bits = tensor.view(torch.int16)
        bits += (torch.rand(bits.shape, generator=generator) < share).to(torch.int16)


def digest_of(tensors: Tensors) -> str:
    return content_digest(
        (name, "BF16", tuple(t.shape), tensor_digest(t.view(torch.uint8).numpy().data))
        for name, t in tensors.items()
    )
