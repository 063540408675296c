"""Random-weight Qwen2 checkpoints of about half a billion parameters."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

__all__ = ["SMALLER", "make_checkpoint", "write_neighbour", "write_variant"]

#: Overrides for a quick try that shows nothing but that the benchmark runs.
SMALLER = {"num_hidden_layers": 2, "vocab_size": 4096}


def make_checkpoint(directory: Path, *, tied: bool, small: bool) -> int:
    """Write a bfloat16 checkpoint of the shape of Qwen2-0.5B; returns its number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    } | (SMALLER if small else {})
    config = Qwen2Config(
        **shape, max_position_embeddings=2048, tie_word_embeddings=tied, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    tensors = model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in tensors.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1)
    # to_empty has untied the head from the embedding.
    tensors.tie_weights()
    tensors.save_pretrained(directory, max_shard_size="256MB")
    return sum(parameter.numel() for parameter in tensors.parameters())


def write_variant(source: Path, target: Path, mask: int) -> None:
    """Write the checkpoint with the low bits of every value flipped by `mask` (1 to 15)."""
    for file in sorted(source.iterdir()):
        content = np.fromfile(file, dtype=np.uint8)
        if file.suffix == ".safetensors":
            (header,) = struct.unpack("<Q", content[:8].tobytes())
            _check_dtypes(content[8 : 8 + header].tobytes())
            data = content[8 + header :].view(np.uint16)
            data ^= np.uint16(mask)
        target.mkdir(exist_ok=True)
        content.tofile(target / file.name)


def write_neighbour(source: Path, target: Path, share: float, seed: int) -> float:
    """Write the checkpoint with single values off by one ulp; returns the share that really is.

    Args:
        source: The checkpoint.
        target: Where the other one goes.
        share: Of the values, at random places all over every tensor.
        seed: Of the places.
    """
    rng = np.random.default_rng(seed)
    changed = count = 0
    for file in sorted(source.iterdir()):
        content = np.fromfile(file, dtype=np.uint8)
        if file.suffix == ".safetensors":
            (header,) = struct.unpack("<Q", content[:8].tobytes())
            data = content[8 + header :].view(np.uint16)
            places = np.cumsum(rng.geometric(share, int(len(data) * share * 1.1) + 100)) - 1
            places = places[places < len(data)]
            data[places] ^= 1
            changed, count = changed + len(places), count + len(data)
        target.mkdir(exist_ok=True)
        content.tofile(target / file.name)
    return changed / count


def _check_dtypes(header: bytes) -> None:
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    assert {entry["dtype"] for entry in entries.values()} == {"BF16"}
