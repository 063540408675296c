"""Parameters whose halves vLLM has exchanged since its loaders wrote them.

Gate and up projection of experts lie one below the other. Some kernels (FlashInfer's with CUTLASS)
want them the other way round, and their scales too, so that vLLM exchanges both when it has loaded
them. That is still a copy of each, only to the other half. Which way round a parameter is shows in
its own bytes: the checkpoint's are there in one order only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.live_params import view_of
from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from weightsync.vllm.plan.live_params import LiveParameters
    from weightsync.vllm.plan.load_plan import LoadPlan, Slice
    from weightsync.vllm.plan.staged_tensors import StagedTensors

__all__ = ["in_live_order"]


@dataclass(frozen=True)
class _Halves:
    """How the rows of each expert of a parameter lie, in elements.

    Attributes:
        expert: From an expert to the next.
        size: From the first half of an expert to the second one.
    """

    expert: int
    size: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Halves | None:
        """Return those of a parameter; None: it has none."""
        if tensor.dim() != 3 or tensor.shape[1] % 2 or not tensor.is_contiguous():
            return None
        return cls(tensor.stride(0), tensor.stride(0) // 2)

    def holds(self, item: Slice) -> bool:
        """Whether a slice lies within one half of one expert."""
        target = item.target
        last = target.offset + sum(
            (length - 1) * step for length, step in zip(target.shape, target.stride, strict=True)
        )
        return target.offset // self.size == last // self.size

    def other(self, item: Slice) -> Slice:
        """Return the same copy to the other half."""
        first = not item.target.offset % self.expert // self.size
        offset = item.target.offset + (self.size if first else -self.size)
        return replace(item, target=replace(item.target, offset=offset))


def in_live_order(
    plan: LoadPlan,
    live: LiveParameters,
    base: LoadPlan | None,
    loaded: Callable[[], StagedTensors],
) -> LoadPlan:
    """Return a plan that writes each half of a parameter where it is live.

    It proves nothing of what it does not look at: whoever adopts the plan compares all of it.

    Args:
        plan: As the loaders write.
        live: The parameters.
        base: The plan of the adopted checkpoint; None: this is it.
        loaded: Returns the checkpoint that the parameters hold; called where nobody has looked yet.

    Raises:
        PlanRefusedError: The loaders do not write each half by itself; naming the tensors.
    """
    wanted = base.exchanged if base is not None else _exchanged_params(plan, live, loaded)
    if not wanted:
        return plan
    halves = {n: found for n, found in _candidates(plan, live).items() if n in wanted}
    across = sorted({item.tensor for item in plan.slices if item.param in wanted - halves.keys()})
    if across:
        msg = (
            "these tensors fill both halves of a parameter at once, and vLLM has exchanged those; "
            "push the names and shapes of the engine's checkpoint"
        )
        raise PlanRefusedError(msg, across)
    slices = (
        halves[item.param].other(item) if item.param in halves else item for item in plan.slices
    )
    return replace(plan, slices=tuple(slices), exchanged=wanted)


def _exchanged_params(
    plan: LoadPlan, live: LiveParameters, loaded: Callable[[], StagedTensors]
) -> frozenset[str]:
    halves = _candidates(plan, live)
    if not halves:
        return frozenset()
    slices: dict[str, list[Slice]] = defaultdict(list)
    for item in plan.slices:
        if item.param in halves:
            slices[item.param].append(item)
    tensors = loaded()
    found = {
        name: _is_exchanged(live.tensor(name), slices[name], tensors, each)
        for name, each in halves.items()
    }
    modules = {_module(name) for name, answer in found.items() if answer}
    # Where both halves are alike, as scales may be, they go with the others of their layer.
    return frozenset(
        name
        for name, answer in found.items()
        if answer or (answer is None and _module(name) in modules)
    )


def _module(param: str) -> str:
    return param.rpartition(".")[0]


def _candidates(plan: LoadPlan, live: LiveParameters) -> Mapping[str, _Halves]:
    """Return the parameters that every slice fills a part of a half of."""
    found: dict[str, _Halves | None] = {}
    for item in plan.slices:
        if item.param not in found:
            found[item.param] = _Halves.of(live.tensor(item.param))
        halves = found[item.param]
        if halves is not None and not halves.holds(item):
            found[item.param] = None
    return {name: halves for name, halves in found.items() if halves is not None}


def _is_exchanged(
    param: torch.Tensor, slices: Iterable[Slice], tensors: StagedTensors, halves: _Halves
) -> bool | None:
    """Return what the first slice tells that can tell; None: none can."""
    device = None if param.device.type == "cpu" else param.device
    for item in slices:
        wanted = tensor_digest_of(tensors.slice(item), param.dtype, device=device)
        here, there = (
            tensor_digest_of(view_of(param, each.target)) == wanted
            for each in (item, halves.other(item))
        )
        if here != there:
            return there
        if not here:
            # Neither: more was done to it, and the comparison of all will name it.
            return False
    return None
