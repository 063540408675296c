"""Experts that transformers keeps in one parameter and checkpoints one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["fused_view"]

#: What transformers 5 puts behind each other for each expert, as checkpoints of Qwen's and the
#: models after it call it; vLLM has them in this order as well.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

#: Experts, the rows of one, and their length.
_DIMS = 3


def fused_view(
    name: str, shape: Sequence[int], live: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return one view of experts that lie behind each other; None: they do not, or are none.

    Args:
        name: Of the parameter, such as `model.layers.0.mlp.experts.gate_up_proj`.
        shape: Its experts, the rows of one, and their length.
        live: Views by the names of the checkpoint.
    """
    prefix, _, kind = name.rpartition(".")
    if kind not in _PARTS or len(shape) != _DIMS:
        return None
    names = [
        f"{prefix}.{expert}.{part}.weight" for expert in range(shape[0]) for part in _PARTS[kind]
    ]
    if any(each not in live for each in names):
        return None
    views = [live[each] for each in names]
    first, at = views[0], int(views[0].storage_offset())
    for view in views:
        if not _follows(view, first, at) or view.shape[1] != shape[2]:
            return None
        at += view.numel()
    if at - first.storage_offset() != math.prod(shape):
        return None
    stride = (shape[1] * shape[2], shape[2], 1)
    return first.as_strided(tuple(shape), stride, first.storage_offset())


def _follows(view: torch.Tensor, first: torch.Tensor, at: int) -> bool:
    """Tell whether a view begins at an element of the memory that another one lies in."""
    if view.dtype != first.dtype or view.ndim != first.ndim or not view.is_contiguous():
        return False
    same = view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    return same and view.storage_offset() == at
