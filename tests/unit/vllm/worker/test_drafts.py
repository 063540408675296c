"""A rank with a draft: both of it are written, or the draft stays, and its way back is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync import failpoints
from weightsync.vllm.worker import plan_transform

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.staging import Staging, Version


class ToyDraft(torch.nn.Module):
    """Has a layer, and its target's embedding.

    Args:
        target: What it guesses for.
        name: Of its layer's tensor, where its checkpoint is the target's.
    """

    def __init__(self, target: ToyModel, name: str = "fc") -> None:
        super().__init__()
        self.embed = target.embed
        self.fc = torch.nn.Parameter(torch.zeros(4, 8), requires_grad=False)
        self._name = name

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        missing = {self._name}
        for name, tensor in weights:
            if name == self._name:
                self.fc.data.copy_(tensor)
                missing.clear()
            elif name == "embed":
                self.embed.data[: tensor.shape[0]].copy_(tensor)
            elif self._name == "fc":
                raise KeyError(name)
        if missing:
            # As vLLM's MTP models do.
            msg = f"{missing} are missing"
            raise ValueError(msg)


class Target(ToyModel):
    """Leaves the layers of a draft in its checkpoint out."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if not name.startswith("mtp."):
            super().load_one(name, tensor)


def _fc(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


class Site:
    """A rank whose draft has names of one kind."""

    def __init__(self, staging: Staging, kind: str) -> None:
        self.staging = staging
        self.name = "draft.fc" if kind == "eagle" else "mtp.fc"
        target = load_for_real(Target(), toy_tensors(1))
        self.draft = ToyDraft(target, "fc" if kind == "eagle" else "mtp.fc")
        self.draft.fc.data.copy_(_fc(1))
        self.worker = Worker(target, staging)
        self.worker.model_runner.get_draft_model = lambda: self.draft
        model = "elsewhere" if kind == "eagle" else "here"
        self.worker.vllm_config = SimpleNamespace(  # type: ignore[attr-defined]
            model_config=SimpleNamespace(model="here"),
            speculative_config=SimpleNamespace(
                method=kind, draft_model_config=SimpleNamespace(model=model)
            ),
        )
        self.first = self.version(1, 1)
        self.worker.adopt(self.first)

    def version(self, seed: int, draft: int | None, **more: torch.Tensor) -> Version:
        own = {} if draft is None else {self.name: _fc(draft)}
        return self.staging.stage_files([save({**toy_tensors(seed), **own, **more})])

    def prepare(self, apply_id: str, version: Version) -> Any:
        report = self.worker.job("prepare", apply_id, version)
        if report["phase"] == "needs_capture":
            reply = self.worker.call("capture", document=version.document.id)
            if not reply["ok"]:
                return reply
            report = self.worker.job("prepare", apply_id, version)
        return report

    def commit(self, apply_id: str) -> Any:
        return self.worker.call("commit", apply_id=apply_id)

    def holds(self, seed: int, draft: int) -> bool:
        wanted = load_for_real(ToyModel(), toy_tensors(seed)).state_dict()
        found = self.worker.model.state_dict()
        same = all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        return same and torch.equal(self.draft.fc, _fc(draft))


@pytest.fixture(params=["eagle", "mtp"])
def site(request: pytest.FixtureRequest, staging: Staging) -> Site:
    return Site(staging, request.param)


def test_a_version_goes_into_both_and_back(site: Site) -> None:
    assert site.prepare("two", site.version(2, 2))["phase"] == "ready"
    reply = site.commit("two")
    assert reply["ok"]
    assert site.holds(2, 2)
    assert site.commit("base")["content_digest"] == site.first.content_digest
    assert site.holds(1, 1)


def test_a_draft_that_is_not_brought_stays(site: Site) -> None:
    assert site.prepare("two", site.version(2, None))["phase"] == "ready"
    assert site.commit("two")["ok"]
    assert site.holds(2, 1)


def test_the_draft_of_a_version_without_one_comes_back_with_it(site: Site) -> None:
    target = site.version(2, None)
    for name, version in (("two", target), ("three", site.version(3, 3))):
        assert site.prepare(name, version)["phase"] == "ready"
        assert site.commit(name)["ok"]
    assert site.holds(3, 3)
    reply = site.commit("two")
    assert reply["content_digest"] == target.content_digest
    assert site.holds(2, 1)
    assert site.commit("base")["ok"]
    assert site.holds(1, 1)


def test_the_way_back_goes_over_versions_that_bring_drafts(site: Site) -> None:
    versions = {"two": (2, None), "three": (3, 3), "four": (4, 4)}
    for name, seeds in versions.items():
        assert site.prepare(name, site.version(*seeds))["phase"] == "ready"
        assert site.commit(name)["ok"]
    assert site.commit("three")["ok"]
    assert site.holds(3, 3)
    assert site.commit("two")["ok"]
    assert site.holds(2, 1)


def test_a_version_without_a_draft_is_not_live_because_its_target_is(site: Site) -> None:
    target, both = site.version(2, None), site.version(2, 2)
    for name, version in (("two", target), ("both", both)):
        assert site.prepare(name, version)["phase"] == "ready"
    assert site.commit("both")["ok"]
    report = site.worker.job("prepare", "two", target, compare_live=True)
    assert report["proved"]
    assert site.worker.call("state")["content_digest"] == both.content_digest


def test_a_write_that_breaks_off_is_taken_back_with_its_draft(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hit(name: str) -> None:
        if name == "worker.written":
            msg = "it breaks off"
            raise OSError(msg)

    for name, version in (("two", site.version(2, None)), ("three", site.version(3, 3))):
        assert site.prepare(name, version)["phase"] == "ready"
    assert site.commit("two")["ok"]
    with monkeypatch.context() as broken:
        broken.setattr(failpoints, "hit", hit)
        assert not site.commit("three")["ok"]
    assert site.draft.fc.equal(_fc(3))
    assert site.commit("two")["ok"]
    assert site.holds(2, 1)


def test_a_draft_that_does_not_come_back_is_told(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("two", site.version(2, None)), ("three", site.version(3, 3))):
        assert site.prepare(name, version)["phase"] == "ready"
        assert site.commit(name)["ok"]
    without = lambda self, threads: self.writer.write(threads)  # noqa: E731
    monkeypatch.setattr(plan_transform._WithDraft, "write", without)
    reply = site.commit("two")
    assert (reply["ok"], reply["mismatched"]) == (False, ["draft.fc"])


def test_what_the_draft_shares_must_be_as_in_the_target(staging: Staging) -> None:
    site = Site(staging, "eagle")
    same, other = ({"draft.embed": toy_tensors(seed)["embed"]} for seed in (2, 1))
    assert site.prepare("two", site.version(2, 2, **same))["phase"] == "ready"
    report = site.prepare("three", site.version(3, 3, **other))
    assert report["names"] == ["draft.embed"]
    assert "of the draft equal" in report["error"]


def test_a_draft_is_whole_or_not_there(site: Site) -> None:
    lacking = {name: tensor for name, tensor in toy_tensors(2).items() if name != "down"}
    report = site.prepare("two", site.staging.stage_files([save({**lacking, site.name: _fc(2)})]))
    assert report["names"] == ["down"]
    wide = site.staging.stage_files([save({**toy_tensors(2), site.name: torch.zeros(4, 9)})])
    assert site.prepare("three", wide)["names"] == [site.name]


def test_a_draft_that_is_nowhere_is_told(staging: Staging) -> None:
    site = Site(staging, "eagle")
    lost = Worker(site.worker.model, staging)
    lost.vllm_config = site.worker.vllm_config  # type: ignore[attr-defined]
    reply = lost.call("hello")
    assert "--speculative-config" in reply["error"]
