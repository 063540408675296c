"""Whether the live layout of a model can be written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.vllm.cpu_plain import packs_experts
from weightsync.vllm.env import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["why_not_plain"]

_REMEDY = "restart vLLM with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1"
_NO_REMEDY = "WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 does not prevent that here; serve the model on a GPU"


def _captures_a_copy(function: Callable[..., object]) -> bool:
    # vLLM sets `layer.cpu_linear` to a function that uses the layer's weight argument, or to one
    # that holds a packed copy: closed over (oneDNN, sgl) or as a default (zentorch).
    return bool(getattr(function, "__closure__", None) or getattr(function, "__defaults__", None))


def why_not_plain(model: torch.nn.Module) -> str:
    """Return "" if every parameter is what the forward pass reads, else one sentence."""
    settings = EngineSettings.load()
    remedy = _NO_REMEDY if settings.cpu_plain_linear else _REMEDY
    for name, module in model.named_modules():
        function = vars(module).get("cpu_linear")
        packed = function is not None and _captures_a_copy(function)
        if packed or "_cpu_unpacked_conv_weight" in vars(module):
            return f"vLLM computes {name} from a repacked copy of its weights; {remedy}"
        if packs_experts(module):
            cure = _NO_REMEDY if settings.cpu_plain_experts else _REMEDY
            return f"vLLM has repacked the experts of {name}; {cure}"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return (
                f"parameter {name} has no memory (another weight update is running); restart vLLM"
            )
        if parameter.numel() == 0:
            return f"vLLM has repacked parameter {name} and emptied it; {remedy}"
    return ""
