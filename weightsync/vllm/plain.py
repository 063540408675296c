"""Whether the live layout of a model can be written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["PLAIN_REMEDY", "why_not_plain"]

#: What a user does about a repacked CPU engine.
PLAIN_REMEDY = "restart vLLM with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1"


def _captures_a_copy(function: Callable[..., object]) -> bool:
    # vLLM sets `layer.cpu_linear` to a function that uses the layer's weight argument, or to one
    # that holds a packed copy: closed over (oneDNN, sgl) or as a default (zentorch).
    return bool(getattr(function, "__closure__", None) or getattr(function, "__defaults__", None))


def why_not_plain(model: torch.nn.Module) -> str:
    """Return "" if every parameter is what the forward pass reads, else one sentence."""
    for name, module in model.named_modules():
        function = vars(module).get("cpu_linear")
        packed = function is not None and _captures_a_copy(function)
        if packed or "_cpu_unpacked_conv_weight" in vars(module):
            return f"vLLM computes {name} from a repacked copy of its weights; {PLAIN_REMEDY}"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return (
                f"parameter {name} has no memory (another weight update is running); restart vLLM"
            )
        if parameter.numel() == 0:
            return f"vLLM has repacked parameter {name} and emptied it; {PLAIN_REMEDY}"
    return ""
