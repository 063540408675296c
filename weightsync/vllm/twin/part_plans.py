"""Load plans of the parts of a model, each captured while it is loaded alone, as one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync.model.manifest import Layout
from weightsync.vllm.plan.capture import capture_plan
from weightsync.vllm.plan.live_params import LiveParameters
from weightsync.vllm.plan.load_plan import LoadPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch

    from weightsync.vllm.plan.load_plan import Slice
    from weightsync.vllm.plan.model_parts import PartNames

__all__ = ["capture_part", "joined", "slices_of"]


def capture_part(
    model: torch.nn.Module, names: PartNames, layout: Layout, shared: Collection[str] = ()
) -> LoadPlan:
    """Return the copies that load a part, with paths and names of the whole.

    Args:
        model: The part, without weights yet.
        names: How what belongs to it is called.
        layout: Of a version of the whole.
        shared: Paths of its modules that are another part's later: what is loaded into them is not
            served.

    Raises:
        PlanRefusedError: Its loaders do more than copy, or refuse a tensor; with names.
    """
    own = {names.own_name(tensor.name): tensor for tensor in layout.tensors}
    tensors = {name: tensor for name, tensor in own.items() if name is not None}
    part = Layout(
        layout.shards, tuple(replace(tensor, name=name) for name, tensor in tensors.items())
    )
    plan, _ = capture_plan(model, LiveParameters(model), part, dict)
    return replace(
        plan,
        slices=tuple(
            replace(item, tensor=tensors[item.tensor].name, param=names.path + item.param)
            for item in plan.slices
            if not any(item.param.startswith(f"{path}.") for path in shared)
        ),
        param_dtypes={names.path + name: dtype for name, dtype in plan.param_dtypes.items()},
        draft=frozenset(names.path + name for name in plan.written if names.path),
    )


def joined(plans: Sequence[LoadPlan], layout: Layout) -> LoadPlan:
    """Return the plans of all parts as one.

    They were captured where weights are loaded: of what is ignored there nothing is read.

    Args:
        plans: As `capture_part` returned them.
        layout: Of the whole.
    """
    joint = LoadPlan(
        signature=layout.signature,
        tensors={t.name: (t.dtype, t.shape) for t in layout.tensors},
        slices=tuple(item for plan in plans for item in plan.slices),
        param_dtypes={name: kind for plan in plans for name, kind in plan.param_dtypes.items()},
        draft=frozenset(name for plan in plans for name in plan.draft),
    )
    return replace(joint, unread=frozenset(joint.ignored))


def slices_of(plan: LoadPlan, names: PartNames) -> Iterator[tuple[str, Slice]]:
    """Yield the copies into a part, each with the path of its parameter there."""
    for item in plan.slices:
        if (item.param in plan.draft) == bool(names.path):
            yield item.param.removeprefix(names.path), item
