"""Loaders find parameters as they were created, over the memory that is live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.vllm.conftest import layout_of
from weightsync.vllm.plan.capture import capture_plan
from weightsync.vllm.plan.live_params import LiveParameters, as_created, note_parameters, view_of
from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Cut(torch.nn.Parameter):
    """A parameter that knows how it is cut, as vLLM's do."""

    rank: int

    def load(self, tensor: torch.Tensor) -> None:
        size = self.data.shape[0]
        self.data.copy_(tensor.narrow(0, self.rank * size, size))


class _Model(torch.nn.Module):
    """Loads as vLLM does, and replaces its parameters by plain ones when it has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.nn.Module()
        self.layer.weight = _Cut(torch.zeros(2, 4), requires_grad=False)
        self.layer.weight.rank = 1
        self.layer.scale = _Cut(torch.zeros(1, 4), requires_grad=False)
        self.layer.scale.rank = 0
        self.load: Any = lambda param, tensor: param.load(tensor)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(getattr(self.layer, name), tensor)

    def finish(self) -> None:
        for name in ("weight", "scale"):
            made = getattr(self.layer, name).data.clone()
            setattr(self.layer, name, torch.nn.Parameter(made, requires_grad=False))


TENSORS = {"weight": torch.arange(16.0).reshape(4, 4), "scale": torch.ones(1, 4)}


@pytest.fixture
def model() -> _Model:
    made = _Model()
    note_parameters(made)
    with torch.no_grad():
        made.load_weights(TENSORS.items())
    made.finish()
    return made


def test_a_capture_finds_how_replaced_parameters_are_cut(model: _Model) -> None:
    live = LiveParameters(model)
    before = dict(model.named_parameters())
    plan, _ = capture_plan(model, live, layout_of(TENSORS))
    assert plan.written == {"layer.weight": 8, "layer.scale": 4}
    for item in plan.slices:
        source = view_of(TENSORS[item.tensor], item.source)
        assert torch.equal(view_of(live.tensor(item.param), item.target), source)
    assert all(model.get_parameter(name) is param for name, param in before.items())


def test_without_a_note_the_loaders_error_is_told(model: _Model) -> None:
    other = _Model()
    with torch.no_grad():
        other.load_weights(TENSORS.items())
    other.finish()
    with pytest.raises(PlanRefusedError, match="refused tensor"):
        capture_plan(other, LiveParameters(other), layout_of(TENSORS))


def test_another_form_stays_as_it_is(model: _Model) -> None:
    layer = model.layer
    layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
    layer.scale = torch.nn.Parameter(layer.scale.data.half(), requires_grad=False)
    before = dict(model.named_parameters())
    with as_created(model):
        assert all(model.get_parameter(name) is param for name, param in before.items())


def test_what_was_not_replaced_is_not_touched() -> None:
    fresh = _Model()
    note_parameters(fresh)
    weight = fresh.layer.weight
    with as_created(fresh):
        assert fresh.layer.weight is weight


def _new(model: _Model) -> None:
    model.layer.weight = torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False)


def _moved(model: _Model) -> None:
    model.layer.weight.data = torch.zeros(2, 4)


@pytest.mark.parametrize("replace", [_new, _moved])
def test_a_loader_that_replaces_is_still_found(model: _Model, replace: Any) -> None:
    loaded = []

    def load(param: _Cut, tensor: torch.Tensor) -> None:
        param.load(tensor)
        loaded.append(param)
        if len(loaded) == len(TENSORS):
            replace(model)

    model.load = load
    weight, before = model.layer.weight, model.layer.weight.clone()
    with pytest.raises(PlanRefusedError, match="replace parameters"):
        capture_plan(model, LiveParameters(model), layout_of(TENSORS))
    assert model.layer.weight is weight
    assert torch.equal(weight, before)
