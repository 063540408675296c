"""What a rank does whose transform is that of docs/how-to/extending.md; run by `test_extending`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import staging, toy_tensors
from tests.unit.vllm.worker.test_rank import adopted

if TYPE_CHECKING:
    from tests.support.staging import Staging

__all__ = ["staging"]


def test_a_version_with_nan_is_refused_by_name_and_nothing_is_written(staging: Staging) -> None:
    rank = adopted(staging, [save(toy_tensors(1))])
    before = {name: value.clone() for name, value in rank.model.named_parameters()}
    bad = toy_tensors(2)
    name = next(name for name, tensor in bad.items() if tensor.is_floating_point())
    bad[name].view(-1)[0] = float("nan")
    report = rank.job("prepare", "two", staging.stage_files([save(bad)]))
    assert (report["phase"], report["names"]) == ("failed", [name])
    assert "NaN" in report["error"]
    assert rank.call("state")["apply_id"] == "base"
    assert all(torch.equal(value, before[name]) for name, value in rank.model.named_parameters())
    good = staging.stage_files([save(toy_tensors(3))])
    assert rank.job("prepare", "three", good)["phase"] == "ready"
    assert rank.call("commit", apply_id="three")["content_digest"] == good.content_digest
