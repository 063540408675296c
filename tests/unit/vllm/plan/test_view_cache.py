"""Views are made again exactly where they would be others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync.vllm.apply.segment_mappings import SegmentMappings
from weightsync.vllm.plan.live_params import LiveParameters
from weightsync.vllm.plan.staged_tensors import ViewCache

if TYPE_CHECKING:
    from tests.support.staging import Staging, Version
    from weightsync.vllm.plan.load_plan import LoadPlan
    from weightsync.vllm.worker.rank import Rank


@pytest.fixture
def worker(staging: Staging) -> Worker:
    found = Worker(load_for_real(ToyModel(), toy_tensors(1)), staging)
    found.adopt(staging.stage_files([save(toy_tensors(1))]))
    return found


def rank_of(worker: Worker) -> Rank:
    rank: Rank = worker._weightsync_rank  # type: ignore[attr-defined]
    return rank


def plan_of(worker: Worker) -> LoadPlan:
    plan = rank_of(worker)._plan._plans.base
    assert plan is not None
    return plan


def sources(views: ViewCache, version: Version, plan: LoadPlan) -> list[torch.Tensor]:
    segments = [segment.view for segment in version.segments]
    staged = version.staged
    return views.read(staged.manifest.layout, staged.segments, plan, segments).sources


def test_what_lies_in_the_same_segments_is_viewed_once_and_read_anew(
    worker: Worker, staging: Staging
) -> None:
    plan, views = plan_of(worker), ViewCache(LiveParameters(worker.model))
    version, other = (staging.stage_files([save(toy_tensors(seed))]) for seed in (2, 3))
    first = sources(views, version, plan)
    assert sources(views, other, plan) is not first
    assert sources(views, version, plan) is first
    entry = version.staged.manifest.layout.shards[0]
    segment, raw = version.segments[0], save(toy_tensors(4))
    segment.view[: entry.size] = raw
    for item, source in zip(plan.slices, first, strict=True):
        part = item.source
        wanted = toy_tensors(4)[item.tensor].as_strided(part.shape, part.stride, part.offset)
        assert torch.equal(source, wanted)


def test_a_copy_of_what_lies_at_an_odd_address_is_made_every_time(
    worker: Worker, staging: Staging
) -> None:
    raw = save(toy_tensors(2))
    size = int.from_bytes(raw[:8], "little")
    odd = (size + 1).to_bytes(8, "little") + raw[8 : 8 + size] + b" " + raw[8 + size :]
    plan, views = plan_of(worker), ViewCache(LiveParameters(worker.model))
    version = staging.stage_files([odd])
    assert sources(views, version, plan) is not sources(views, version, plan)


def test_segments_are_unmapped_although_they_were_viewed(worker: Worker, staging: Staging) -> None:
    version = staging.stage_files([save(toy_tensors(2))])
    worker.job("prepare", "two", version, base="base")
    kept = worker.call("state")["segments"]
    mapped = worker.call("release", keep=["base"], segments=[])["mapped"]
    assert len(mapped) == kept - 1


def test_a_parameter_that_was_replaced_has_other_targets(worker: Worker) -> None:
    plan, views = plan_of(worker), ViewCache(LiveParameters(worker.model))
    first = views.targets(plan)
    assert views.targets(plan) is first
    held = worker.model.head
    worker.model.head = torch.nn.Parameter(held.detach().double(), requires_grad=False)
    assert views.targets(plan) is not first


def test_what_somebody_still_views_stays_mapped_and_whole(staging: Staging) -> None:
    version = staging.stage_files([save(toy_tensors(1))])
    mappings = SegmentMappings()
    (view,) = mappings.map(staging.socket, version.staged.segments)
    array = np.frombuffer(view, dtype=np.uint8)
    before = bytes(array[:64])
    mappings.unmap(version.staged.segments)
    assert len(mappings) == 1
    # Whoever maps it again gets something to read.
    (again,) = mappings.map(staging.socket, version.staged.segments)
    assert bytes(again[:64]) == bytes(array[:64]) == before
    del array, view, again
    mappings.unmap(version.staged.segments)
    assert len(mappings) == 0
