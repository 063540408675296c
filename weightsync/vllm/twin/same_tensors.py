"""Whether a version has the tensors of the engine's own checkpoint.

vLLM itself does not notice a missing or a foreign tensor of a quantised model, and converts a wrong
dtype without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout

__all__ = ["check_same"]


def check_same(layout: Layout, checkpoint: Layout, *, whole: bool = True) -> None:
    """Refuse tensors that are others than those of a checkpoint.

    Args:
        layout: Of a version, or of a part of it.
        checkpoint: What the engine loaded when it started.
        whole: Whether all of the checkpoint's must be there.

    Raises:
        PlanRefusedError: Naming them.
    """
    if layout.signature == checkpoint.signature:
        return
    known = {tensor.name: tensor for tensor in checkpoint.tensors}
    unknown = [tensor.name for tensor in layout.tensors if tensor.name not in known]
    if unknown:
        msg = "the engine's checkpoint has no such tensors; leave them out"
        raise PlanRefusedError(msg, unknown)
    shapes = [t.name for t in layout.tensors if t.shape != known[t.name].shape]
    if shapes:
        msg = "these tensors have another shape than in the engine's checkpoint; push its model"
        raise PlanRefusedError(msg, shapes)
    dtypes = [t.name for t in layout.tensors if t.dtype != known[t.name].dtype]
    if dtypes:
        msg = (
            "these tensors have another dtype than in the engine's checkpoint, from which vLLM "
            "computes its weights; convert them before the push"
        )
        raise PlanRefusedError(msg, dtypes)
    missing = known.keys() - {tensor.name for tensor in layout.tensors}
    if whole and missing:
        msg = "the version lacks these tensors of the model; push all of them"
        raise PlanRefusedError(msg, sorted(missing))
