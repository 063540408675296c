"""What a model reads besides its parameters, and how much of that an update in place reaches."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.unit.vllm.conftest import watched_load
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, Slice, Strides
from weightsync.vllm.plan.load_watch import (
    check_complete,
    check_read,
    forward_tensors,
    made_by_loading,
    watch_loading,
)
from weightsync.vllm.plan.model_parts import ModelWithDraft
from weightsync.vllm.plan.read_watch import _VALUES, values_read

if TYPE_CHECKING:
    from collections.abc import Callable


class _Slotted:
    __slots__ = ("empty", "packed")

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed


class _Kernel:
    """A helper object that answers for its attributes itself, and must not be asked."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    @property
    def costly(self) -> torch.Tensor:
        raise AssertionError

    def run(self) -> torch.Tensor:
        return self.packed


class _Layer(torch.nn.Module):
    """A linear layer with what vLLM's layers have beside their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4, 6), requires_grad=False)
        self.rotary: torch.Tensor
        self.register_buffer("rotary", torch.arange(8.0), persistent=False)
        self.scale = torch.ones(())
        self.cache = torch.empty(0)
        self.kernel: Any = None


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Layer()
        # An object that leads back to the modules, as vLLM's configuration does.
        self.config: Any = SimpleNamespace(context={"layer": self.layer}, root=self)


def _loaders(process: Callable[[_Layer], object]) -> Any:
    """Return what stands for vLLM's module: it builds, fills and processes a model."""

    class BaseModelLoader:
        def load_model(self, *, seed: int = 1) -> _Model:
            model: _Model = loaders.initialize_model()
            generator = torch.Generator().manual_seed(seed)
            model.layer.weight.copy_(torch.randn(4, 6, generator=generator))
            process(model.layer)
            return model

    loaders = SimpleNamespace(initialize_model=_Model, BaseModelLoader=BaseModelLoader)
    watch_loading(loaders)
    watch_loading(loaders)
    return loaders


def _loaded(process: Callable[[_Layer], object]) -> _Model:
    model: _Model = _loaders(process).BaseModelLoader().load_model()
    return model


def _refused(model: _Model) -> list[str]:
    with pytest.raises(PlanRefusedError) as caught:
        check_complete(model, [model.layer.weight.detach()])
    return caught.value.names


def _absorb(layer: _Layer) -> None:
    layer.kernel = layer.weight[:, :2].T.contiguous()


def _fill_a_buffer(layer: _Layer) -> None:
    layer.rotary.copy_(layer.weight.reshape(-1)[:8])


def _close_over(layer: _Layer) -> None:
    packed = layer.weight.clone()
    layer.kernel = lambda x: x @ packed


_COPIES: dict[str, tuple[Callable[[_Layer], object], str]] = {
    "a bare attribute": (_absorb, "layer.kernel"),
    "a new parameter": (
        lambda layer: setattr(
            layer, "W_UV", torch.nn.Parameter(layer.weight.T.contiguous(), False)
        ),
        "layer.W_UV",
    ),
    "a buffer that is filled": (_fill_a_buffer, "layer.rotary"),
    "a scale": (lambda layer: layer.scale.fill_(float(layer.weight.max())), "layer.scale"),
    "in a closure": (_close_over, "layer.kernel.<packed>"),
    "in a helper object": (
        lambda layer: setattr(layer, "kernel", _Kernel(layer.weight.clone())),
        "layer.kernel.packed",
    ),
    "in slots": (
        lambda layer: setattr(layer, "kernel", _Slotted(layer.weight.clone())),
        "layer.kernel.packed",
    ),
    "bound to a method": (
        lambda layer: setattr(layer, "kernel", _Kernel(layer.weight.clone()).run),
        "layer.kernel.__self__.packed",
    ),
    "in a default": (
        lambda layer: setattr(layer, "kernel", _with_default(layer.weight.clone())),
        "layer.kernel.__defaults__.[0]",
    ),
    "in a partial": (
        lambda layer: setattr(layer, "kernel", functools.partial(max, layer.weight.clone())),
        "layer.kernel.args[0]",
    ),
    "deep in containers": (
        lambda layer: setattr(layer, "kernel", {"a": [(layer.weight.clone(),)]}),
        "layer.kernel['a'][0][0]",
    ),
    "in a module that nobody lists": (
        lambda layer: setattr(layer, "kernel", [_linear(layer.weight.clone())]),
        "layer.kernel[0].weight",
    ),
    "larger than what is covered": (
        lambda layer: setattr(layer, "kernel", torch.cat([layer.weight, layer.weight])),
        "layer.kernel",
    ),
}


def _with_default(packed: torch.Tensor) -> Callable[..., torch.Tensor]:
    def multiply(x: torch.Tensor, weight: torch.Tensor = packed) -> torch.Tensor:
        return x @ weight

    return multiply


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(6, 4, bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return linear


@pytest.mark.parametrize("case", _COPIES)
def test_what_loading_makes_of_the_weights_is_refused_by_name(case: str) -> None:
    process, path = _COPIES[case]
    assert _refused(_loaded(process)) == [path.replace(".[", "[")]


@pytest.mark.parametrize(
    "process",
    [
        lambda layer: None,
        # The same value as before, written again.
        lambda layer: layer.scale.fill_(1.0),
        lambda layer: setattr(layer, "kernel", layer.weight[:, 2:].T),
        lambda layer: setattr(layer, "kernel", _Kernel(layer.weight)),
        lambda layer: setattr(layer, "kernel", _Kernel(layer.rotary)),
        lambda layer: layer.register_parameter(
            "view", torch.nn.Parameter(layer.weight.view(2, 12), requires_grad=False)
        ),
        # As vLLM replaces a parameter by one that its kernel prefers: the plan finds the new one.
        lambda layer: setattr(
            layer, "weight", torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
        ),
    ],
    ids=["plain", "default", "view", "kernel", "alias", "parameter", "replaced"],
)
def test_views_and_what_does_not_depend_on_weights_are_no_obstacle(
    process: Callable[[_Layer], object],
) -> None:
    model = _loaded(process)
    check_complete(model, [model.layer.weight.detach()])
    made = made_by_loading(model)
    assert made is not None
    assert "layer.rotary" not in made
    assert "layer.scale" not in made


def test_what_forward_passes_make_later_is_no_obstacle() -> None:
    model = _loaded(lambda layer: None)
    model.layer.cache = torch.randn(3, 3)
    model.layer.kernel = torch.randn(7)
    check_complete(model, [model.layer.weight.detach()])


def test_a_parameter_that_the_plan_does_not_write_is_refused() -> None:
    model = _loaded(lambda layer: None)
    with pytest.raises(PlanRefusedError, match=r"layer\.weight"):
        check_complete(model, [])


def test_where_nobody_watched_the_loading_everything_must_be_covered() -> None:
    model = _Model()
    assert made_by_loading(model) is None
    with pytest.raises(PlanRefusedError, match="VLLM_PLUGINS=weightsync") as caught:
        check_complete(model, [model.layer.weight.detach()])
    assert caught.value.names == ["layer.rotary", "layer.scale"]
    check_complete(model, [model.layer.weight, model.layer.rotary, model.layer.scale])


def test_a_look_that_fails_does_not_keep_vllm_from_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weightsync.vllm.plan.load_watch.tensor_digest_of", lambda _: 1 // 0)
    assert made_by_loading(_loaded(lambda layer: None)) is None


def test_records_do_not_outlive_their_models() -> None:
    from weightsync.vllm.plan import load_watch

    # What earlier tests left shall not go in between.
    gc.collect()
    before = len(load_watch._made)
    model = _loaded(lambda layer: None)
    assert len(load_watch._made) == before + 1
    model.config = None
    del model
    assert len(load_watch._made) == before
    assert not load_watch._before


def test_paths_are_the_names_that_torch_gives() -> None:
    model = _loaded(lambda layer: None)
    paths = [path for path, _ in forward_tensors(model)]
    assert paths[:2] == ["layer.weight", "layer.rotary"]
    assert sorted(paths) == ["layer.cache", "layer.rotary", "layer.scale", "layer.weight"]


class _Scaled(torch.nn.Module):
    """Is given a scale, from which its last step of loading makes something, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.default = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.number = 1.0
        self.other = 0.5
        self.last: Any = id

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name == "scale":
                self.scale.data.copy_(tensor)
            elif name == "looked at":
                assert tensor.sum() > 0

    def process(self) -> None:
        self.last(self)


def _computed(last: Callable[[_Scaled], object]) -> frozenset[str]:
    def made() -> _Scaled:
        model = _Scaled()
        model.last = last
        return model

    from weightsync.vllm.plan import load_watch

    tensors = {name: torch.ones(2) for name in ("scale", "looked at", "left")}
    model = watched_load(made, tensors)
    assert "load_weights" not in vars(model)
    loaded = load_watch._made[model]
    assert loaded.read == frozenset({"scale", "looked at"})
    return loaded.computed


def _new(model: _Scaled) -> None:
    model.made = 3.0 * model.scale.max().item()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("last", "computed"),
    [
        (lambda model: None, set()),
        (lambda model: setattr(model, "other", 0.25), {"other"}),
        # Equal to what it was, and from what was loaded.
        (lambda model: setattr(model, "number", model.scale[0].item()), {"number"}),
        (lambda model: setattr(model, "number", float(model.scale[0])), {"number"}),
        (lambda model: setattr(model, "number", model.scale.tolist()[0]), {"number"}),
        (lambda model: setattr(model, "number", float(model.scale.numpy()[0])), {"number"}),
        (lambda model: setattr(model, "number", model.scale.max().item()), {"number"}),
        (_new, {"made", "number"}),
        # What was not loaded is what it is with any checkpoint.
        (lambda model: setattr(model, "number", model.default[0].item()), set()),
        (lambda model: setattr(model, "more", 1.5), set()),
    ],
)
def test_numbers_that_come_from_the_weights_are_known(
    last: Callable[[_Scaled], object], computed: set[str]
) -> None:
    assert _computed(last) == computed


def test_torch_is_as_before_when_a_model_was_loaded() -> None:
    before = {name: getattr(torch.Tensor, name) for name in _VALUES}
    seen: list[float] = []

    def note(tensor: torch.Tensor) -> None:
        # Digests read integers.
        if tensor.is_floating_point():
            seen.append(tensor.sum().item())

    # As in a loader, which watches by itself a load that is watched.
    with values_read(note):
        assert _computed(lambda model: setattr(model, "number", model.scale[0].item())) == {
            "number"
        }
        assert seen == [1.0]
        torch.ones(3).tolist()
    assert seen == [1.0, 3.0]
    assert {name: getattr(torch.Tensor, name) for name in _VALUES} == before
    assert not {"item", "tolist", "numpy"} & vars(torch.Tensor).keys()


@pytest.mark.parametrize("repeats", ["", "shared", "repeats"])
def test_what_a_draft_has_read_counts_under_its_name_in_versions(repeats: str) -> None:
    given = {name: torch.ones(2) for name in ("scale", "looked at")}
    target, draft = watched_load(_Scaled, {"scale": torch.ones(2)}), watched_load(_Scaled, given)
    both = ModelWithDraft(target, draft, "draft.")
    names = ("scale", "draft.scale", "draft.looked at", "draft.left")
    whole = Strides(0, (2,), (1,))
    plan = LoadPlan(
        "",
        dict.fromkeys(names, ("F32", (2,))),
        tuple(Slice(name, name, whole, whole, cast=False) for name in names[:2]),
        {},
    )
    if repeats:
        # What vLLM serves from its target, or loads into one place, is compared with that.
        same = {"draft.looked at": "scale"}
        shares = repeats == "shared"
        alike = replace(plan, shared=same) if shares else replace(plan, repeats=same)
        assert check_read(both, alike).unread == {"draft.left"}
        return
    with pytest.raises(PlanRefusedError, match=r"vLLM read draft\.looked at") as refused:
        check_read(both, plan)
    assert refused.value.names == ["draft.looked at"]
