"""A target and its draft as one model: paths, names and what both have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.unit.vllm.conftest import layout_of
from weightsync.vllm.plan.live_params import LiveParameters
from weightsync.vllm.plan.load_watch import forward_tensors
from weightsync.vllm.plan.model_parts import (
    ModelWithDraft,
    PartNames,
    names_of_parts,
    parts_of,
    shared_modules,
)
from weightsync.vllm.shadow.vllm_load import capture_part, joined, slices_of


class _Part(nn.Module):
    """Has an embedding and a layer."""

    def __init__(self, embed: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = embed or nn.Embedding(4, 2)
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 2, bias=False)})

    def load_weights(self, weights: Any) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def _both() -> ModelWithDraft:
    target = _Part()
    return ModelWithDraft(target, _Part(target.embed), "draft.")


def test_paths_of_the_target_stay_as_they_are() -> None:
    model = _both()
    wanted = {"embed.weight", "layers.0.weight", "draft.layers.0.weight"}
    assert set(dict(model.named_parameters())) == wanted
    assert set(LiveParameters(model).names()) == wanted
    assert {path for path, _ in forward_tensors(model)} == wanted
    assert LiveParameters(model).tensor("draft.layers.0.weight").shape == (2, 2)


def test_names_go_to_the_part_that_they_are_for() -> None:
    target, draft = names_of_parts("draft.")
    assert (target.own_name("a"), target.own_name("draft.a")) == ("a", None)
    assert (draft.own_name("a"), draft.own_name("draft.a")) == (None, "a")
    target, draft = names_of_parts("")
    assert target.own_name("mtp.a") == draft.own_name("mtp.a") == "mtp.a"
    assert names_of_parts(None) == (PartNames(),)
    # Without a draft it is a name as any other.
    assert names_of_parts(None)[0].own_name("draft.a") == "draft.a"


def test_what_both_have_is_known_by_its_place() -> None:
    assert shared_modules(_both()) == {"embed": "embed"}
    assert shared_modules(_Part()) == {}
    target = _Part()
    assert shared_modules(ModelWithDraft(target, _Part(), "")) == {}


def test_plans_of_parts_are_the_plan_of_the_whole() -> None:
    tensors = {"embed.weight": torch.ones(4, 2), "layers.0.weight": torch.ones(2, 2)}
    whole = {**tensors, **{f"draft.{name}": tensor.clone() for name, tensor in tensors.items()}}
    layout = layout_of(whole)
    parts = names_of_parts("draft.")
    plan = joined([capture_part(_Part(), names, layout) for names in parts], layout)
    assert plan.signature == layout.signature
    assert {item.tensor: item.param for item in plan.slices} == {name: name for name in whole}
    assert plan.draft == {"draft.embed.weight", "draft.layers.0.weight"}
    for names in parts:
        assert [param for param, _ in slices_of(plan, names)] == list(tensors)
    assert plan.brings_draft(whole)
    assert not plan.brings_draft(tensors)
    assert plan.asked_of(tensors).loaded == tensors.keys()
    assert plan.asked_of([*tensors, "draft.embed.weight"]) is plan, "a part of it is not enough"


def test_what_is_not_served_is_not_loaded_into_a_part() -> None:
    tensors = {"embed.weight": torch.ones(4, 2), "layers.0.weight": torch.ones(2, 2)}
    layout = layout_of({f"draft.{name}": tensor for name, tensor in tensors.items()})
    plan = capture_part(_Part(), names_of_parts("draft.")[1], layout, {"embed": "embed"})
    assert plan.loaded == {"draft.layers.0.weight"}


def test_a_model_without_a_draft_is_one_part() -> None:
    model = _Part()
    ((module, names),) = parts_of(model)
    assert (module, names) == (model, PartNames())
