"""Two loads of one version have one form; what differs is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.load_watch import watch_loading
from weightsync.vllm.shadow.model_state import StateForm, state_of, weight_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Layer(torch.nn.Module):
    """Has a parameter, a view of it as a bare attribute, a scale, and a number."""

    def __init__(self, *, rows: int = 4) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(rows * 8.0).reshape(rows, 8))
        self.absorbed = self.weight.detach()[1:3].t()
        self.scale = torch.tensor(2.0)
        self.scale_float = 2.0


def model(**options: Any) -> Any:
    return torch.nn.Sequential(Layer(**options))


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {path: tensor_digest_of(tensor) for path, tensor in tensors.items()}


PATHS = frozenset({"0.weight", "0.absorbed", "0.scale"})


def test_what_shares_memory_is_one_piece_of_it() -> None:
    state = state_of(model(), PATHS)
    forms = state.form.tensors
    assert forms["0.absorbed"].span == forms["0.weight"].span
    assert forms["0.absorbed"].offset == 8 * 4
    assert forms["0.absorbed"].stride == (1, 8)
    assert forms["0.scale"].span != forms["0.weight"].span
    assert sorted(state.form.spans) == [4, 4 * 8 * 4]
    assert [row.numel() for row in state.memory] == list(state.form.spans)


def test_the_memory_is_the_models_own() -> None:
    layer = model()
    state = state_of(layer, PATHS)
    state.memory[state.form.tensors["0.weight"].span].zero_()
    assert not layer[0].weight.any()


def test_two_loads_have_one_form_and_json_keeps_it() -> None:
    one, other = state_of(model(), PATHS).form, state_of(model(), PATHS).form
    assert one.differences(other) == []
    assert StateForm.from_json(one.to_json()) == other


def test_another_shape_alias_or_one_number_more_is_named() -> None:
    form = state_of(model(), PATHS).form
    assert form.differences(state_of(model(rows=6), PATHS).form) == ["0.weight"]
    other = model()
    other[0].another_float = 3.0
    assert form.differences(state_of(other, PATHS).form) == ["0.another_float"]
    apart = model()
    apart[0].absorbed = apart[0].absorbed.clone()
    assert "0.absorbed" in form.differences(state_of(apart, PATHS).form)


def test_what_is_gone_is_refused_by_name() -> None:
    with pytest.raises(PlanRefusedError) as refused:
        state_of(model(), PATHS | {"0.lost"})
    assert refused.value.names == ["0.lost"]


def test_memory_between_elements_is_refused() -> None:
    gaps = model()
    gaps[0].absorbed = torch.zeros(4, 8)[:, ::2]
    with pytest.raises(PlanRefusedError) as refused:
        state_of(gaps, PATHS)
    assert refused.value.names == ["0.absorbed"]


def test_others_are_digested_where_they_are_asked_for() -> None:
    one = state_of(model(), {"0.weight", "0.absorbed"}, digests)
    assert set(one.others) == {"0.scale"}
    changed = model()
    changed[0].scale.fill_(3.0)
    other = state_of(changed, {"0.weight", "0.absorbed"}, digests)
    assert one.others != other.others


def test_every_tensor_lies_in_a_piece() -> None:
    forms = state_of(model(), PATHS).form.tensors
    assert forms.keys() == PATHS
    assert all(form.span >= 0 for form in forms.values())


def test_what_loading_made_belongs_to_the_weights() -> None:
    class Loader:
        def load_model(self) -> Any:
            loaded: Any = loaders.initialize_model()
            loaded[0].weight.data.mul_(2)
            loaded[0].scale.fill_(3.0)
            return loaded

    loaders = SimpleNamespace(initialize_model=model, BaseModelLoader=Loader)
    watch_loading(loaders)
    assert weight_paths(Loader().load_model()) == PATHS


def test_a_model_that_nobody_saw_being_loaded_is_refused() -> None:
    with pytest.raises(PlanRefusedError, match="VLLM_PLUGINS=weightsync"):
        weight_paths(model())


@pytest.mark.parametrize(
    ("plain", "amx", "remedy"),
    [
        ("0", True, "restart vLLM with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1"),
        # int8: with it vLLM keeps from kernels that would leave tensors.
        ("1", True, "restart vLLM with 0"),
        ("1", False, "serve the model on a GPU"),
    ],
)
def test_a_handle_of_one_process_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, plain: str, amx: bool, remedy: str
) -> None:
    class Handler:
        """As vLLM's, of weights that oneDNN has packed."""

        def __init__(self) -> None:
            self.handler_tensor = torch.tensor([1234])

    packed = model()
    packed.handler = Handler()
    monkeypatch.setenv("WEIGHTSYNC_CPU_PLAIN_WEIGHTS", plain)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    match = f"memory that cannot be copied; .*{remedy}"
    with pytest.raises(PlanRefusedError, match=match) as refused:
        state_of(packed, [*PATHS, "handler.handler_tensor"])
    assert refused.value.names == ["handler.handler_tensor"]


def _watched_load() -> Callable[[], Any]:
    """Return what loads models under the watch that vLLM's loaders get."""

    class Loader:
        def load_model(self) -> Any:
            return loaders.initialize_model()

    loaders = SimpleNamespace(initialize_model=model, BaseModelLoader=Loader)
    watch_loading(loaders)
    return Loader().load_model


def test_numbers_are_what_there_was_when_loading_ended() -> None:
    load = _watched_load()
    live, second = load(), load()
    live[0].table = {"theta": 5.0}
    before = state_of(live, PATHS).form
    # As kernels keep when they run first what they have made of the scales.
    live[0].bmm1_scale = 0.125
    state = state_of(live, PATHS)
    assert state.numbers == {"0.scale_float": (2.0).hex()}
    assert set(state.later) == {"0.bmm1_scale", "0.table['theta']"}
    assert state.form == before
    assert state.form.differences(state_of(second, PATHS).form) == []


def test_numbers_that_no_attribute_holds_are_compared_by_value() -> None:
    one, other = model(), model()
    one[0].table, other[0].table = {"theta": 5.0}, {"theta": 6.0}
    form = state_of(one, PATHS).form
    assert form.differences(state_of(other, PATHS).form) == ["0.table['theta']"]


def test_a_scale_that_loading_left_as_it_was_belongs_to_the_weights() -> None:
    assert "0.scale" in weight_paths(_watched_load()())
