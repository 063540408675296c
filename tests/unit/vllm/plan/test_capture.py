"""The load plan is what the model's own loaders do, or the model is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.vllm.conftest import ToyModel, layout_of, load_for_real, toy_tensors
from weightsync.vllm.plan.capture import capture_plan, unplaced
from weightsync.vllm.plan.live_params import LiveParameters, view_of
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, check_against_base


def _capture(model: Any, tensors: dict[str, torch.Tensor]) -> LoadPlan:
    return capture_plan(model, LiveParameters(model), layout_of(tensors))[0]


def _apply(plan: LoadPlan, model: ToyModel, tensors: dict[str, torch.Tensor]) -> None:
    live = LiveParameters(model)
    for item in plan.slices:
        source = view_of(tensors[item.tensor], item.source)
        view_of(live.tensor(item.param), item.target).copy_(source)


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plan_loads_what_the_loaders_load(rank: int, tied: bool, dtype: Any) -> None:
    tensors = toy_tensors(2, dtype=dtype, tied=tied)
    wanted = _parameters(load_for_real(ToyModel(rank=rank, tied=tied, dtype=dtype), tensors))
    model = load_for_real(
        ToyModel(rank=rank, tied=tied, dtype=dtype), toy_tensors(1, dtype=dtype, tied=tied)
    )
    plan = _capture(model, tensors)
    _apply(plan, model, tensors)
    for name, tensor in _parameters(model).items():
        assert torch.equal(tensor, wanted[name]), name


def test_capture_changes_nothing() -> None:
    model = load_for_real(ToyModel(), toy_tensors(1))
    before = _parameters(model)
    objects = {name: id(tensor) for name, tensor in model.named_parameters()}
    _capture(model, toy_tensors(2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in _parameters(model).items())
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == objects


def test_cast_is_part_of_the_slice() -> None:
    model = load_for_real(ToyModel(dtype=torch.bfloat16), toy_tensors(1, dtype=torch.bfloat16))
    plan = _capture(model, toy_tensors(2))
    assert {item.cast for item in plan.slices} == {True}
    assert set(plan.param_dtypes.values()) == {"BF16"}


def test_ignored_tensors_are_known() -> None:
    plan = _capture(load_for_real(ToyModel(tied=True), toy_tensors(1, tied=True)), toy_tensors(2))
    assert plan.ignored == ("head",)


class _Loader(ToyModel):
    """A toy whose loader of `down` is replaced."""

    def __init__(self, load: Any) -> None:
        super().__init__()
        self._load = load

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "down":
            self._load(self, tensor)
        else:
            super().load_one(name, tensor)


def _set_data(model: ToyModel, tensor: torch.Tensor) -> None:
    model.down.data = torch.zeros(tensor.shape[0], 3)


def _replace(model: ToyModel, tensor: torch.Tensor) -> None:
    model.down = torch.nn.Parameter(tensor, requires_grad=False)


def _in_place_after(model: ToyModel, tensor: torch.Tensor) -> None:
    model.down.data.copy_(tensor.narrow(1, 0, 3))
    model.down.data.mul_(2)


def _read_value(model: ToyModel, tensor: torch.Tensor) -> None:
    model.rank = int(tensor[0, 0].item())


def _buffered_sum(model: ToyModel, tensor: torch.Tensor) -> None:
    model.extra = tensor.sum(dim=1)


REFUSED = {
    "computes": (lambda m, t: m.down.data.copy_(-t.narrow(1, 0, 3).exp()), "computes new values"),
    "joins": (lambda m, t: m.down.data.copy_(torch.cat([t, t], 1)[:, 2:5]), "computes new values"),
    "broadcasts": (lambda m, t: m.down.data.copy_(t[:1, :1]), "shape [1, 1]"),
    "changes after": (_in_place_after, "aten::mul_"),
    "reads a value": (_read_value, "reads its value"),
    "keeps a sum": (_buffered_sum, "computes with it"),
    "replaces memory": (_set_data, "replace parameters"),
    "replaces the parameter": (_replace, "replace parameters"),
    "raises": (lambda m, t: m.down.data.view(7), "loader refused tensor down"),
    "rounds twice": (
        lambda m, t: m.down.data.copy_(t.narrow(1, 0, 3).contiguous().to(torch.float16)),
        "computes new values",
    ),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_more_than_a_copy_is_refused_by_name(case: str) -> None:
    load, sentence = REFUSED[case]
    model = load_for_real(_Loader(lambda m, t: m.down.data.copy_(t[:, :3])), toy_tensors(1))
    object.__setattr__(model, "_load", load)
    before = _parameters(model)
    parameters = dict(model.named_parameters())
    with pytest.raises(PlanRefusedError, match=r"down|replace") as caught:
        _capture(model, toy_tensors(2))
    assert sentence in caught.value.message
    assert all(model.get_parameter(name) is tensor for name, tensor in parameters.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in _parameters(model).items())


class _Strict(ToyModel):
    """Refuses names that it does not know as vLLM does: with all that it knows."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name not in toy_tensors(1):
            known = ", ".join(f"'model.layers.{index}.weight'" for index in range(50))
            first, text = name.partition(".")[0], f"are: {{{known}}}"
            raise ValueError(f"There is no module named '{first}' in Toy. The available {text}\nx")
        super().load_one(name, tensor)


_COMPILED = (
    "the model's loader refused tensor _orig_mod.down: torch.compile put _orig_mod into its name; "
    "push model._orig_mod.state_dict(), or take _orig_mod out of the names"
)
_OTHER = (
    "the model's loader refused tensor module.down (ValueError: There is no module named 'module' "
    "in Toy. The available are: {'model.layers.0.weight', 'model.layers.1.weight', "
    "'model.layers.2.weight', ...); push the names and shapes of the engine's checkpoint"
)


@pytest.mark.parametrize(("prefix", "sentence"), [("_orig_mod.", _COMPILED), ("module.", _OTHER)])
def test_what_a_loader_raises_is_one_sentence_with_a_remedy(prefix: str, sentence: str) -> None:
    model = load_for_real(_Strict(), toy_tensors(1))
    tensors = {prefix + name: tensor for name, tensor in toy_tensors(2).items()}
    with pytest.raises(PlanRefusedError) as caught:
        _capture(model, tensors)
    assert caught.value.message == sentence
    assert caught.value.names == [f"{prefix}down"]


def test_a_loader_that_raises_without_a_word() -> None:
    def load(model: ToyModel, tensor: torch.Tensor) -> None:
        del model, tensor
        raise KeyError

    good = _Loader(lambda m, t: m.down.data.copy_(t[:, :3]))
    model = load_for_real(good, toy_tensors(1))
    object.__setattr__(model, "_load", load)
    with pytest.raises(PlanRefusedError, match=r"refused tensor down \(KeyError\); push"):
        _capture(model, toy_tensors(2))


def test_moves_and_single_conversions_are_still_copies() -> None:
    def load(model: ToyModel, tensor: torch.Tensor) -> None:
        moved = tensor.to(model.down.dtype).contiguous()
        model.down.data.copy_(moved.narrow(1, 3, 3))

    model = load_for_real(_Loader(load), toy_tensors(1))
    double = {name: tensor.to(torch.float64) for name, tensor in toy_tensors(2).items()}
    plan = _capture(model, double)
    (item,) = (item for item in plan.slices if item.tensor == "down")
    assert (item.source.offset, item.source.stride, item.cast) == (3, (6, 1), True)


def test_two_tensors_in_one_place_are_refused() -> None:
    class Overlapping(ToyModel):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one("q" if name == "k" else name, tensor)

    with pytest.raises(PlanRefusedError, match="same place of qk") as caught:
        _capture(Overlapping(), toy_tensors(1))
    assert sorted(caught.value.names) == ["k", "q"]


def test_a_tied_head_that_was_written_twice_repeats_the_embeddings() -> None:
    class Tied(ToyModel):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            # As vLLM does where the head is the embeddings' own parameter.
            super().load_one("down" if name == "copy" else name, tensor)

    tensors = toy_tensors(1)
    copy = {"copy": tensors["down"].clone()}
    for twice in (copy | tensors, tensors | copy):
        plan = _capture(Tied(), twice)
        assert plan.ignored == ("copy",)
        assert "down" in plan.loaded
        digests = {name: tensor.numpy().tobytes() for name, tensor in twice.items()}
        plan.note_ignored(digests, frozenset(plan.ignored))
        assert plan.same_as == {"copy": "down"}
        # A trainer leaves it out, or sends the same once more; something else is refused.
        check_against_base(layout_of(tensors), plan, alone=True)
        plan.accept_ignored(digests, plan, frozenset(plan.ignored))
        stale = digests | {"copy": b"other"}
        with pytest.raises(PlanRefusedError, match="their content differs"):
            plan.accept_ignored(stale, plan, frozenset(plan.ignored))
        # Nor where it was another one at adoption: which of them counts, their order decides.
        plan.same_as["copy"] = ""
        with pytest.raises(PlanRefusedError, match="their content differs"):
            plan.accept_ignored(stale, plan, frozenset(plan.ignored))


def test_overlap_is_found_in_strided_places() -> None:
    class Overlapping(ToyModel):
        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            if name == "q":
                self.qk.data[:, 1:3].copy_(tensor[:, :2])
            elif name == "k":
                self.qk.data[1:2].copy_(tensor[:1])
            else:
                super().load_one(name, tensor)

    with pytest.raises(PlanRefusedError, match="same place of qk"):
        _capture(Overlapping(), toy_tensors(1))


def _quantised(dtype: Any) -> ToyModel:
    model = load_for_real(ToyModel(), toy_tensors(1))
    model.down = torch.nn.Parameter(model.down.data.to(dtype), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("pushed", "held", "says"),
    [
        (torch.bfloat16, torch.float8_e4m3fn, "BF16 where the model holds F8_E4M3"),
        (torch.float8_e4m3fn, torch.bfloat16, "F8_E4M3 where the model holds BF16"),
        (torch.float8_e5m2, torch.float8_e4m3fn, "F8_E5M2 where the model holds F8_E4M3"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_quantisation_is_no_conversion(pushed: Any, held: Any, says: str, whole: bool) -> None:
    model = _quantised(held)
    tensors = toy_tensors(2)
    tensors["down"] = tensors["down"].to(pushed)
    look = capture_plan
    if not whole:
        look, tensors = unplaced, {"down": tensors["down"]}  # type: ignore[assignment]  # asked alike
    with pytest.raises(PlanRefusedError, match=says) as caught:
        look(model, LiveParameters(model), layout_of(tensors))
    assert caught.value.names == ["down"]


def test_what_is_quantised_already_is_copied_as_it_is() -> None:
    model = _quantised(torch.float8_e4m3fn)
    tensors = toy_tensors(2)
    tensors["down"] = tensors["down"].to(torch.float8_e4m3fn)
    tensors["scale"] = torch.tensor(2.0).to(torch.float8_e8m0fnu)
    plan = _capture(model, tensors)
    casts = {item.tensor: item.cast for item in plan.slices}
    # A scale that is an exponent alone is exact in the model's dtype.
    assert (casts["down"], casts["scale"]) == (False, True)
    assert plan.param_dtypes["down"] == "F8_E4M3"


def test_what_a_loader_puts_into_bare_attributes_is_put_back() -> None:
    def load(model: Any, tensor: torch.Tensor) -> None:
        model.indices, model.cached = torch.tensor([9]), None
        model.down.data.copy_(tensor.narrow(1, 0, 3))

    model = _Loader(load)
    model.indices, model.cached = torch.tensor([1]), torch.tensor([2.0])
    bare = model.indices, model.cached
    _capture(model, toy_tensors(2))
    assert (model.indices, model.cached) == bare


class _Reranker(ToyModel):
    """Borrows a head while it is loaded, as vLLM does for models that are made of generators."""

    error: BaseException | None = None

    def load_weights(self, weights: Any) -> set[str]:
        self.lm_head = torch.nn.Linear(4, 8, bias=False)
        rank, mask = self.rank, self._buffers.pop("mask")
        self.rank, self.notes = 7, [rank]
        del self.embed
        del self.absorbed
        if self.error is not None:
            raise self.error
        weights = list(weights)
        self.lm_head.weight.data.copy_(dict(weights)["head"])
        self.register_buffer("mask", mask)
        return set()


@pytest.mark.parametrize("error", [None, MemoryError(), KeyboardInterrupt()])
def test_a_capture_that_fails_leaves_no_trace(error: BaseException | None) -> None:
    model = _Reranker()
    model.register_buffer("mask", torch.ones(2))
    model.register_buffer("other", torch.ones(2))
    model.absorbed = model.qk.detach().T
    model.error = error
    attributes, before = dict(vars(model)), _tensors(model)
    with pytest.raises((PlanRefusedError, MemoryError, KeyboardInterrupt)):
        _capture(model, toy_tensors(2))
    assert [name for name, _ in model.named_modules()] == [""]
    assert list(vars(model)) == list(attributes)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert _tensors(model) == before


def _tensors(model: torch.nn.Module) -> list[tuple[str, int]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(tensor)) for name, tensor in tensors]
