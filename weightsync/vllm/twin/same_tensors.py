"""Whether a version has the tensors of the engine's own checkpoint.

vLLM itself does not notice a missing or a foreign tensor of a quantised model, and converts a wrong
dtype without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.model.tensor_facts import unlike
from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.model.manifest import Layout, TensorEntry

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
        msg = "leave them out: the engine's checkpoint has no such tensors"
        raise PlanRefusedError(msg, unknown)
    shapes = [t for t in layout.tensors if t.shape != known[t.name].shape]
    if shapes:
        clause = _unlike(shapes[0], known)
        msg = f"push its model: {clause}; another shape than in the engine's checkpoint"
        raise PlanRefusedError(msg, [t.name for t in shapes])
    dtypes = [t for t in layout.tensors if t.dtype != known[t.name].dtype]
    if dtypes:
        clause = _unlike(dtypes[0], known)
        msg = (
            f"convert before the push: {clause}; another dtype than in the engine's checkpoint, "
            "from which vLLM computes its weights"
        )
        raise PlanRefusedError(msg, [t.name for t in dtypes])
    missing = known.keys() - {tensor.name for tensor in layout.tensors}
    if whole and missing:
        msg = "push all of them: the version lacks these tensors of the model"
        raise PlanRefusedError(msg, sorted(missing))


def _unlike(tensor: TensorEntry, known: Mapping[str, TensorEntry]) -> str:
    wanted = known[tensor.name]
    return unlike(tensor.name, (tensor.dtype, tensor.shape), (wanted.dtype, wanted.shape))
