"""Whether the live layout of a model can be written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weightsync.vllm.cpu_plain import packs_experts
from weightsync.vllm.env import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NotPlain", "remedy_of", "why_not_plain"]

_REMEDY = "restart vLLM with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1"
_NO_REMEDY = "WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 does not prevent that here; "
_OTHERWISE = (
    "restart vLLM with 0, for this processor has AMX, whose kernels hold weights in tensors, which "
    "are loaded beside generation, or "
)
_GPU = "serve the model on a GPU"


def _captures_a_copy(function: Callable[..., object]) -> bool:
    # vLLM sets `layer.cpu_linear` to a function that uses the layer's weight argument, or to one
    # that holds a packed copy: closed over (oneDNN, sgl) or as a default (zentorch).
    return bool(getattr(function, "__closure__", None) or getattr(function, "__defaults__", None))


def remedy_of(*, plain: bool) -> str:
    """Return what helps against weights that vLLM on a CPU has packed where nothing reads them.

    Args:
        plain: Whether it was started with what keeps it from that.
    """
    if not plain:
        return _REMEDY
    amx = bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001 - what vLLM itself asks
    return f"{_NO_REMEDY}{_OTHERWISE if amx else ''}{_GPU}"


class NotPlain(NamedTuple):
    """Why a live layout cannot be written in place, and what vLLM would have to be started with."""

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


def why_not_plain(model: torch.nn.Module) -> NotPlain | None:
    """Return None if every parameter is what the forward pass reads, else why it is not."""
    settings = EngineSettings.load()
    remedy = remedy_of(plain=settings.cpu_plain_linear)
    for name, module in model.named_modules():
        function = vars(module).get("cpu_linear")
        packed = function is not None and _captures_a_copy(function)
        if packed or "_cpu_unpacked_conv_weight" in vars(module):
            cause = f"vLLM computes {name} from a repacked copy of its weights"
            return NotPlain(cause, remedy)
        if packs_experts(module):
            cure = remedy_of(plain=settings.cpu_plain_experts)
            return NotPlain(f"vLLM has repacked the experts of {name}", cure)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            cause = f"parameter {name} has no memory (another weight update is running)"
            return NotPlain(cause, "restart vLLM")
        if parameter.numel() == 0:
            return NotPlain(f"vLLM has repacked parameter {name} and emptied it", remedy)
    return None
