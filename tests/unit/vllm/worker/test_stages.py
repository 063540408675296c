"""Two pipeline stages over real segments: each holds a part, together they hold a version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.worker.test_rank import Worker
from weightsync.model.name_sets import common, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.staging import Staging, Version


class Stage(torch.nn.Module):
    """A layer, the embedding on the first stage, a head on the last one that may be tied to it."""

    def __init__(self, index: int, *, tied: bool) -> None:
        super().__init__()
        self.index = index
        self.tied = tied
        zeros = torch.zeros
        self.layer = torch.nn.Parameter(zeros(4, 4), requires_grad=False)
        if index == 0 or tied:
            self.embed = torch.nn.Parameter(zeros(6, 4), requires_grad=False)
        if index == 1 and not tied:
            self.head = torch.nn.Parameter(zeros(6, 4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == f"layers.{self.index}":
                self.layer.data.copy_(tensor)
            elif name in ("embed", "head") and hasattr(self, name):
                getattr(self, name).data.copy_(tensor)
            elif name not in ("layers.0", "layers.1", "embed", "head", "spare"):
                raise KeyError(name)


def _tensors(seed: int, *, tied: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (6, 4), "layers.0": (4, 4), "layers.1": (4, 4), "head": (6, 4)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if tied:
        del made["head"]
    return made


class Pair:
    """Both stages, and the server's part between them."""

    def __init__(self, staging: Staging, *, tied: bool) -> None:
        self.staging = staging
        self.stages = []
        for index in range(2):
            model = Stage(index, tied=tied)
            with torch.no_grad():
                model.load_weights(_tensors(1, tied=tied).items())
            worker = Worker(model, staging, rank=index)
            worker.parallel_config = SimpleNamespace(
                data_parallel_size=1,
                data_parallel_rank=0,
                tensor_parallel_size=1,
                pipeline_parallel_size=2,
            )
            self.stages.append(worker)

    def version(self, tensors: dict[str, torch.Tensor]) -> Version:
        return self.staging.stage_files([save(tensors)])

    def prepare(self, apply_id: str, version: Version, **more: Any) -> list[dict[str, Any]]:
        reports = self._jobs(apply_id, version, unloaded="", **more)
        if {report["phase"] for report in reports} != {"needs_capture"}:
            return reports
        replies = [s.call("capture", document=version.document.id) for s in self.stages]
        if refused := [reply for reply in replies if not reply["ok"]]:
            return refused
        unloaded = common(reply["ignored"] for reply in replies)
        return self._jobs(apply_id, version, unloaded=unloaded, **more)

    def _jobs(self, apply_id: str, version: Version, **more: Any) -> list[dict[str, Any]]:
        return [stage.job("prepare", apply_id, version, **more) for stage in self.stages]

    def commit(self, apply_id: str) -> set[str]:
        return {stage.call("commit", apply_id=apply_id)["content_digest"] for stage in self.stages}


@pytest.mark.parametrize("tied", [False, True])
def test_every_stage_takes_its_part_and_gives_it_back(staging: Staging, tied: bool) -> None:
    pair = Pair(staging, tied=tied)
    first, second = (pair.version(_tensors(seed, tied=tied)) for seed in (1, 2))
    for report in pair.prepare("one", first, compare_live=True):
        assert report["proved"] is True, report
    assert {report["phase"] for report in pair.prepare("two", second)} == {"ready"}
    assert pair.commit("two") == {second.content_digest}
    wanted = _tensors(2, tied=tied)
    for index, stage in enumerate(pair.stages):
        assert torch.equal(stage.model.layer, wanted[f"layers.{index}"])
    last = pair.stages[1].model
    assert torch.equal(last.embed if tied else last.head, wanted["embed" if tied else "head"])
    assert pair.commit("one") == {first.content_digest}


def test_a_head_that_repeats_the_embedding_is_taken_and_another_one_is_not(
    staging: Staging,
) -> None:
    pair = Pair(staging, tied=True)
    pair.prepare("one", pair.version(_tensors(1, tied=True)), compare_live=True)
    second = _tensors(2, tied=True)
    repeated = pair.version({**second, "head": second["embed"].clone()})
    assert {report["phase"] for report in pair.prepare("two", repeated)} == {"ready"}
    other = pair.version({**second, "head": second["embed"] + 1})
    for report in pair.prepare("three", other):
        assert (report["phase"], report["refused"], report["names"]) == ("failed", True, ["head"])
    assert {stage.call("state")["apply_id"] for stage in pair.stages} == {"one"}


def test_a_tensor_that_no_stage_loads_is_refused_before_anything_is_written(
    staging: Staging,
) -> None:
    pair = Pair(staging, tied=False)
    pair.prepare("one", pair.version(_tensors(1)), compare_live=True)
    lost = pair.version({**_tensors(2), "spare": torch.ones(4, 4)})
    for report in pair.prepare("two", lost):
        assert (report["phase"], report["names"]) == ("failed", ["spare"])
        assert "loads nothing from these tensors" in report["error"]


def test_a_version_without_the_tensor_of_one_stage_is_refused_by_that_one(
    staging: Staging,
) -> None:
    pair = Pair(staging, tied=False)
    pair.prepare("one", pair.version(_tensors(1)), compare_live=True)
    short = _tensors(2)
    del short["layers.1"]
    first, last = pair.prepare("two", pair.version(short))
    # The server asks for no capture when it hears the other.
    assert (first["phase"], last["phase"], last["names"]) == (
        "needs_capture",
        "failed",
        ["layers.1"],
    )


def test_a_name_is_without_a_place_only_if_no_stage_has_one(staging: Staging) -> None:
    pair = Pair(staging, tied=False)
    base = _tensors(1)
    del base["head"], base["layers.1"]
    pair.stages = pair.stages[:1]
    # As it was started from a checkpoint that names the other stage's tensors in another way.
    (report,) = pair.prepare("base", pair.version(base), compare_live=True)
    assert report["proved"] is True
    part = pair.version({"layers.1": torch.ones(9, 9), "spare": torch.ones(9)})
    names = ("layers.1", "spare")
    first = pair.stages[0].call("check", document=part.document.id)["unplaced"]
    assert unpack(first, names) == {"layers.1", "spare"}
    # The other stage loads the layer.
    assert unpack(common([first, pack({"spare"}, names)]), names) == {"spare"}


def test_a_server_that_was_started_anew_hears_all_stages_again(staging: Staging) -> None:
    pair = Pair(staging, tied=False)
    first = pair.version(_tensors(1))
    # The one before ended between the capture and the next prepare.
    for stage in pair.stages:
        assert stage.call("capture", document=first.document.id)["ok"]
    reports = pair.prepare("one", first, compare_live=True)
    assert [report["proved"] for report in reports] == [True, True]
    # Once heard, it need not be said again.
    assert {report["phase"] for report in pair._jobs("again", first, unloaded="")} == {"ready"}
