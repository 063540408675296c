"""Slices of a load plan as few ranges, and parameters whose halves vLLM exchanged after loading.

Some kernels (FlashInfer's with CUTLASS) want gate and up projection of experts, and their scales,
the other way round, so vLLM exchanges both after loading. Which way round a parameter is shows in
its own bytes: the checkpoint's are there in one order only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.live_params import LiveParameters, Targets, view_of
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, Slice, Strides

if TYPE_CHECKING:
    import torch

    from weightsync.vllm.plan.staged_tensors import StagedTensors


@dataclass(frozen=True)
class _Halves:
    """Elements from an expert of a parameter to the next, and from its first half to its second."""

    expert: int
    size: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Halves | None:
        if tensor.dim() != 3 or tensor.shape[1] % 2 or not tensor.is_contiguous():
            return None
        return cls(tensor.stride(0), tensor.stride(0) // 2)

    def holds(self, item: Slice) -> bool:
        target = item.target
        last = target.offset + sum(
            (length - 1) * step for length, step in zip(target.shape, target.stride, strict=True)
        )
        return target.offset // self.size == last // self.size

    def other(self, item: Slice) -> Slice:
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
    `base` is None for the plan of the adopted checkpoint; only then is `loaded` called, which
    returns that checkpoint.
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


@dataclass(frozen=True, slots=True)
class LoadPart:
    """A slice within a range: its index in the plan, and where it begins, in elements."""

    index: int
    begin: int


@dataclass(frozen=True, slots=True)
class ParamRange:
    """What slices, as they lie there, fill together: without gaps, unless a single one has some."""

    param: str
    place: Strides
    parts: tuple[LoadPart, ...]


def ranges_of(slices: Sequence[Slice]) -> Iterator[ParamRange]:
    """Yield the ranges of slices that do not overlap; those without elements are in no range."""
    by_param: dict[str, list[int]] = {}
    for index, item in enumerate(slices):
        if item.target.numel:
            by_param.setdefault(item.param, []).append(index)
    for param, indices in by_param.items():
        run: list[LoadPart] = []
        begin = end = 0
        for index in sorted(indices, key=lambda index: slices[index].target.offset):
            target = slices[index].target
            if not target.contiguous:
                yield ParamRange(param, target, (LoadPart(index, 0),))
                continue
            if run and target.offset != end:
                yield ParamRange(param, _row(begin, end), tuple(run))
                run = []
            if not run:
                begin = target.offset
            run.append(LoadPart(index, target.offset - begin))
            end = target.offset + target.numel
        if run:
            yield ParamRange(param, _row(begin, end), tuple(run))


def _row(begin: int, end: int) -> Strides:
    return Strides(begin, (end - begin,), (1,))


class LiveRanges:
    """The ranges of a plan in the live parameters; each slice is one, unless `joined`."""

    def __init__(self, slices: Sequence[Slice], *, joined: bool) -> None:
        self._joined = joined
        self.all: Sequence[ParamRange] = (
            tuple(ranges_of(slices))
            if joined
            else [ParamRange(s.param, s.target, (LoadPart(i, 0),)) for i, s in enumerate(slices)]
        )
        self._of: list[torch.Tensor] | None = None
        self._views: list[torch.Tensor] = []

    def views(self, targets: Targets) -> list[torch.Tensor]:
        """Return a live view of each; `targets` are of the same slices, the same at every call."""
        views = targets.views()
        if not self._joined:
            return views
        if self._of is not views:
            self._views = [view_of(targets.param(each.param), each.place) for each in self.all]
            self._of = views
        return self._views
