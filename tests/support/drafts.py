"""Makes tiny but real draft models beside the targets of `models`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.models import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

__all__ = ["joined", "make_eagle", "make_mtp", "without"]


def make_eagle(directory: Path, *, seed: int, **options: Any) -> Path:
    """Write an Eagle draft of one layer for a Llama target of the same sizes; return its directory.

    Names and layers as in https://github.com/SafeAILab/EAGLE: no norm before the first layer, and
    neither an embedding nor a head, which it has from its target.

    Args:
        directory: Made if it does not exist.
        seed: Of the weights.
        options: As for `make_checkpoint`, of the target.
    """
    make_checkpoint(directory, "llama", seed=seed, layers=1, shard_size="1GB", **options)
    (file,) = directory.glob("*.safetensors")
    layer = {
        name.removeprefix("model."): tensor
        for name, tensor in _tensors(file).items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    hidden = layer["layers.0.self_attn.o_proj.weight"].shape[0]
    like = layer["layers.0.self_attn.q_proj.weight"]
    layer["fc.weight"] = _noise((hidden, 2 * hidden), like, seed)
    _save(file, layer)
    return directory


def make_mtp(directory: Path, *, seed: int, **options: Any) -> Path:
    """Write a MiMo checkpoint, a Qwen2 with one layer that guesses the token after the next.

    Names as in https://huggingface.co/XiaomiMiMo/MiMo-7B-Base.

    Args:
        directory: Made if it does not exist.
        seed: Of the weights.
        options: As for `make_checkpoint`.
    """
    make_checkpoint(directory, "qwen2", seed=seed, shard_size="1GB", **options)
    (file,) = directory.glob("*.safetensors")
    tensors = _tensors(file)
    own = "model.mtp_layers.0."
    made = {
        name.replace("model.layers.1.", own): tensor.flip(0).contiguous()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    norm = tensors["model.norm.weight"]
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made[f"{own}{name}.weight"] = norm.clone()
    hidden = norm.shape[0]
    made[f"{own}input_proj.weight"] = _noise((hidden, 2 * hidden), norm, seed)
    _save(file, {**tensors, **made})
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(file)
    return found


def _save(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _noise(shape: tuple[int, int], like: torch.Tensor, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    noise: torch.Tensor = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    return noise.to(like.dtype)


def joined(directory: Path, target: Path, draft: Path | None) -> Path:
    """Write a version's one file, as a trainer of both pushes it; return its directory.

    Args:
        directory: Made.
        target: Checkpoint.
        draft: Checkpoint of the draft, whose names get their prefix; None: there is none.
    """
    directory.mkdir()
    found = dict(_all(target))
    if draft is not None:
        found |= {f"draft.{name}": tensor for name, tensor in _all(draft)}
    _save(directory / "model.safetensors", found)
    return directory


def without(directory: Path, version: Path, names: str) -> Path:
    """Write a version without the tensors whose names begin with `names`; return its directory."""
    directory.mkdir()
    rest = {name: tensor for name, tensor in _all(version) if not name.startswith(names)}
    _save(directory / "model.safetensors", rest)
    return directory


def _all(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        yield from _tensors(file).items()
