"""Which halves vLLM has exchanged shows in the bytes, and plans write them where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tests.unit.vllm.conftest import layout_of
from weightsync.vllm.plan.capture import capture_plan
from weightsync.vllm.plan.halves import in_live_order
from weightsync.vllm.plan.live_params import LiveParameters, view_of
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.vllm.plan.load_plan import Slice
    from weightsync.vllm.plan.staged_tensors import StagedTensors

Tensors = dict[str, torch.Tensor]

EXPERTS, ROWS, COLUMNS = 3, 4, 6


class _Experts(torch.nn.Module):
    """Experts as rank `rank` of two, which has half of the rows of gate and up."""

    w13: torch.nn.Parameter
    w2: torch.nn.Parameter

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        shapes = {
            "w13": (EXPERTS, ROWS, COLUMNS),
            "w13_scale": (EXPERTS, 2, 2),
            "w2": (EXPERTS, COLUMNS, ROWS // 2),
            "w2_scale": (EXPERTS, 2, 2),
        }
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            kind, _, number = name.partition(".")
            if kind == "all":
                self.w13.data.copy_(tensor)
                continue
            param, half = {
                "gate": ("w13", 0),
                "up": ("w13", 1),
                "gate_scale": ("w13_scale", 0),
                "up_scale": ("w13_scale", 1),
                "down": ("w2", None),
                "down_scale": ("w2_scale", None),
            }[kind]
            place = getattr(self, param).data[int(number)]
            if half is not None:
                size = place.shape[0] // 2
                place = place[half * size : (half + 1) * size]
                place.copy_(tensor[self.rank * size : (self.rank + 1) * size])
            elif param == "w2":
                place.copy_(tensor[:, self.rank * place.shape[1] :][:, : place.shape[1]])
            else:
                place.copy_(tensor)


def _tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "gate": (ROWS, COLUMNS),
        "up": (ROWS, COLUMNS),
        "down": (COLUMNS, ROWS),
        "gate_scale": (2, 2),
        "up_scale": (2, 2),
        "down_scale": (2, 2),
    }
    return {
        f"{kind}.{number}": torch.randn(shape, generator=generator)
        for number in range(EXPERTS)
        for kind, shape in shapes.items()
    }


class _Loaded:
    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def slice(self, item: Slice) -> torch.Tensor:
        return view_of(self._tensors[item.tensor], item.source)


def _exchange(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2, dim=1)
    return torch.cat([second, first], dim=1)


def _model(tensors: Tensors, *exchanged: str, rank: int = 0) -> _Experts:
    model = _Experts(rank)
    with torch.no_grad():
        model.load_weights(tensors.items())
    for name in exchanged:
        param = torch.nn.Parameter(_exchange(getattr(model, name).data), requires_grad=False)
        setattr(model, name, param)
    return model


def _plan(model: Any, tensors: Tensors, base: LoadPlan | None = None) -> LoadPlan:
    live = LiveParameters(model)
    plan, _ = capture_plan(model, live, layout_of(tensors))
    return in_live_order(plan, live, base, lambda: cast("StagedTensors", _Loaded(tensors)))


def _write(model: Any, plan: LoadPlan, tensors: Tensors) -> None:
    live = LiveParameters(model)
    for item in plan.slices:
        source = view_of(tensors[item.tensor], item.source)
        view_of(live.tensor(item.param), item.target).copy_(source)


def _holds(model: Any, tensors: Tensors, *exchanged: str) -> bool:
    wanted = dict(_model(tensors, *exchanged, rank=model.rank).named_parameters())
    return all(torch.equal(param, wanted[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("exchanged", [(), ("w13",), ("w13", "w13_scale")])
def test_halves_are_written_where_they_are_live(rank: int, exchanged: tuple[str, ...]) -> None:
    first, second = _tensors(1), _tensors(2)
    model = _model(first, *exchanged, rank=rank)
    plan = _plan(model, first)
    assert plan.exchanged == frozenset(exchanged)
    _write(model, plan, second)
    assert _holds(model, second, *exchanged)
    # Of the same layout, but nobody looks at bytes again, which are not those of the checkpoint.
    _write(model, _plan(model, first, plan), first)
    assert _holds(model, first, *exchanged)


def test_scales_that_are_alike_go_with_their_weights() -> None:
    first, second = _tensors(1), _tensors(2)
    for name in first:
        if "scale" in name:
            first[name] = torch.ones(2, 2)
    model = _model(first, "w13", "w13_scale")
    plan = _plan(model, first)
    assert plan.exchanged == {"w13", "w13_scale"}
    _write(model, plan, second)
    assert _holds(model, second, "w13", "w13_scale")


def test_what_tells_nothing_is_written_as_it_is_loaded() -> None:
    first = _tensors(1)
    for number in range(EXPERTS):
        first[f"up.{number}"] = first[f"gate.{number}"].clone()
    assert _plan(_model(first, "w13"), first).exchanged == frozenset()


def test_the_first_expert_that_can_tell_does() -> None:
    first, second = _tensors(1), _tensors(2)
    first["up.0"] = first["gate.0"].clone()
    model = _model(first, "w13")
    plan = _plan(model, first)
    assert plan.exchanged == {"w13"}
    _write(model, plan, second)
    assert _holds(model, second, "w13")


def test_other_changes_are_left_to_the_proof() -> None:
    first = _tensors(1)
    model = _model(first)
    model.w13.data.mul_(2)
    model.w2.data.copy_(_exchange(model.w2.data))
    assert _plan(model, first).exchanged == frozenset()


def test_a_tensor_of_both_halves_is_refused_by_name() -> None:
    first = _tensors(1)
    model = _model(first, "w13")
    base = _plan(model, first)
    fused = {k: v for k, v in first.items() if not k.startswith(("gate.", "up."))}
    fused["all"] = torch.zeros(EXPERTS, ROWS, COLUMNS)
    with pytest.raises(PlanRefusedError, match="both halves") as caught:
        _plan(model, fused, base)
    assert caught.value.names == ["all"]
    plain = _model(first)
    assert _plan(plain, fused, _plan(plain, first)).written["w13"] == plain.w13.numel()
