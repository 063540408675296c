"""What a rank ignores may be another one's; what nobody loads must repeat what somebody does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.vllm.conftest import layout_of
from weightsync.model.digest import tensor_digest
from weightsync.model.manifest import Manifest
from weightsync.model.name_sets import common, pack
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, Slice, Strides
from weightsync.vllm.plan.plan_cache import NeedsCaptureError, PlanCache, find_plan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.model.manifest import Layout

#: What each of two pipeline stages loads; `spare` is ignored by both.
FIRST, LAST = {"embed", "q"}, {"down", "norm"}


def _tensors(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {name: torch.full((2, 2), index) for index, name in enumerate(sorted(FIRST | LAST))}
    made["embed"] = torch.arange(8.0).reshape(4, 2)
    return made | changes


def _manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    layout = layout_of(tensors)
    return Manifest(
        layout,
        tuple(tensor_digest(tensors[entry.name].numpy().tobytes()) for entry in layout.tensors),
    )


def _plan(layout: Layout, loads: Iterable[str]) -> LoadPlan:
    whole = {t.name: Strides(0, t.shape, (2, 1)) for t in layout.tensors}
    return LoadPlan(
        layout.signature,
        {t.name: (t.dtype, t.shape) for t in layout.tensors},
        tuple(
            Slice(name, f"p.{name}", whole[name], whole[name], cast=False)
            for name in sorted(loads)
            if name in whole
        ),
        {f"p.{name}": "F32" for name in loads},
    )


class Stages:
    """The plans of two pipeline stages, told of each other as the server does it."""

    def __init__(self) -> None:
        self.caches = [PlanCache(alone=False), PlanCache(alone=False)]

    def capture(self, layout: Layout, *loads: set[str]) -> str:
        plans = [_plan(layout, names) for names in loads or (FIRST, LAST)]
        for cache, plan in zip(self.caches, plans, strict=True):
            cache.add(plan)
        return common(pack(frozenset(plan.ignored), plan.tensors) for plan in plans)

    def take(self, manifest: Manifest, *loads: set[str]) -> list[str]:
        """Prepare a version; return whom it is refused by and for which tensors."""
        unloaded = self.capture(manifest.layout, *loads)
        found = []
        for cache in self.caches:
            cache.learn(manifest.layout.signature, unloaded)
            try:
                find_plan(manifest, cache)
            except PlanRefusedError as error:
                found.append(",".join(error.names))
        return found


@pytest.fixture
def stages() -> Stages:
    made = Stages()
    assert made.take(_manifest(_tensors())) == []
    return made


def test_new_names_of_another_stage_are_taken(stages: Stages) -> None:
    tensors = _tensors()
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    names = [{f"model.{name}" for name in stage} for stage in (FIRST, LAST)]
    assert stages.take(_manifest(renamed), *names) == []


def test_what_another_stage_loads_may_be_alike_today_and_differ_tomorrow(stages: Stages) -> None:
    # Two layers that are alike by chance in the adopted checkpoint repeat nothing.
    alike = Stages()
    same = torch.arange(4.0).reshape(2, 2)
    assert alike.take(_manifest(_tensors(q=same, down=same.clone()))) == []
    assert alike.take(_manifest(_tensors())) == []


def test_what_no_stage_loads_is_refused_by_all_of_them_by_name(stages: Stages) -> None:
    lost = _manifest(_tensors(spare=torch.arange(4.0).reshape(2, 2)))
    assert stages.take(lost) == ["spare", "spare"]


def test_what_no_stage_loads_may_repeat_what_any_of_them_does(stages: Stages) -> None:
    tensors = _tensors()
    for name in ("embed", "down"):
        assert stages.take(_manifest(_tensors(spare=tensors[name].clone()))) == []


def test_a_tied_head_of_the_checkpoint_stays_tied_on_every_stage() -> None:
    stages = Stages()
    tensors = _tensors()
    assert stages.take(_manifest(_tensors(head=tensors["embed"].clone()))) == []
    for cache in stages.caches:
        assert cache.base is not None
        assert cache.base.same_as == {"head": "embed"}
    untied = _tensors(head=tensors["embed"] + 1)
    assert stages.take(_manifest(untied)) == ["head", "head"]


def test_nothing_is_decided_before_all_stages_were_heard(stages: Stages) -> None:
    manifest = _manifest(_tensors(spare=_tensors()["q"].clone()))
    unloaded = stages.capture(manifest.layout)
    first = stages.caches[0]
    with pytest.raises(NeedsCaptureError):
        find_plan(manifest, first)
    first.learn(manifest.layout.signature, "")
    with pytest.raises(NeedsCaptureError):
        find_plan(manifest, first)
    first.learn(manifest.layout.signature, unloaded)
    assert find_plan(manifest, first).loaded == FIRST


def test_a_stage_does_not_believe_that_nobody_loads_what_it_does(stages: Stages) -> None:
    manifest = _manifest(_tensors())
    names = [entry.name for entry in manifest.layout.tensors]
    with pytest.raises(ValueError, match="embed is said to be loaded by no rank"):
        stages.caches[0].learn(manifest.layout.signature, pack(frozenset(names), names))
    with pytest.raises(ValueError, match="not a set of names"):
        stages.caches[0].learn(manifest.layout.signature, "?")


def test_one_rank_alone_decides_at_once() -> None:
    alone = PlanCache()
    manifest = _manifest(_tensors())
    alone.add(_plan(manifest.layout, FIRST | LAST))
    find_plan(manifest, alone)
    spare = _manifest(_tensors(spare=torch.ones(3)))
    with pytest.raises(PlanRefusedError, match="does not have") as caught:
        find_plan(spare, alone)
    assert caught.value.names == ["spare"]


def test_another_stage_may_have_the_place_that_this_one_lacks(stages: Stages) -> None:
    spare = _manifest(_tensors(spare=torch.ones(3)))
    for cache in stages.caches:
        with pytest.raises(NeedsCaptureError):
            find_plan(spare, cache)


def test_a_missing_tensor_is_refused_by_the_stage_that_loads_it(stages: Stages) -> None:
    tensors = _tensors()
    del tensors["down"]
    manifest = _manifest(tensors)
    with pytest.raises(NeedsCaptureError):
        find_plan(manifest, stages.caches[0])
    with pytest.raises(PlanRefusedError, match="lacks") as caught:
        find_plan(manifest, stages.caches[1])
    assert caught.value.names == ["down"]


@pytest.mark.parametrize("alike", [True, False])
def test_what_a_draft_has_from_its_target_is_compared_where_vllm_compared_it(
    *, alike: bool
) -> None:
    cache = PlanCache(alone=True)
    embed = _tensors()["embed"]
    base = _manifest(_tensors(draft=embed.clone() if alike else embed + 1))
    plan = replace(_plan(base.layout, FIRST | LAST), shared={"draft": "embed"})
    cache.add(plan)
    cache.learn(base.layout.signature, pack(frozenset(plan.ignored), plan.tensors))
    assert find_plan(base, cache) is plan
    find_plan(_manifest(_tensors(embed=embed + 3, draft=embed + 3)), cache)
    other = _manifest(_tensors(draft=embed + 2))
    if alike:
        with pytest.raises(PlanRefusedError, match="from the target") as refused:
            find_plan(other, cache)
        assert refused.value.names == ["draft"]
    else:
        assert find_plan(other, cache) is plan
