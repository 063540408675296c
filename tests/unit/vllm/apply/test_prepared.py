"""A prepared version is never changed, and what is known of it goes with it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import toy_tensors
from tests.unit.vllm.worker.test_rank import Worker, adopted, give_device
from weightsync.vllm.cuda import device_patch
from weightsync.vllm.env import Amount

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.staging import Staging


@pytest.fixture(params=[None, Amount(1 << 20), Amount(1500)], ids=["host", "staged", "no room"])
def make(
    request: pytest.FixtureRequest, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Worker]:
    monkeypatch.setattr(device_patch, "_WORTH", 1)
    give_device(monkeypatch, request.param)
    return lambda: adopted(staging, [save(toy_tensors(1))])


def _nudged() -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in toy_tensors(1).items()}
    tensors["k"].view(torch.int32)[0, 0] ^= 1 << 20
    return tensors


def _inside(worker: Worker) -> Any:
    return worker._weightsync_rank  # type: ignore[attr-defined] # as it is set up


def _known(worker: Worker) -> tuple[set[str], set[str]]:
    """Return of which versions digests are known, and of which something was made ready."""
    ops = _inside(worker)._ops
    ready = ops._ready if ops.stages else ops._patches
    expected = ops._expected._known
    return {version.apply_id for version in expected}, {version.apply_id for version in ready}


def test_a_prepare_changes_no_version_that_was_prepared_before(
    make: Callable[[], Worker], staging: Staging
) -> None:
    worker = make()
    assert worker.job("prepare", "two", staging.stage_files([save(_nudged())]), base="base")
    prepared = _inside(worker)._prepared["two"]
    before = [getattr(prepared, field.name) for field in dataclasses.fields(prepared)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.plan = None
    assert worker.call("commit", apply_id="two")["patched"] is True
    worker.job("prepare", "three", staging.stage_files([save(toy_tensors(3))]), base="two")
    after = [getattr(prepared, field.name) for field in dataclasses.fields(prepared)]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_what_is_known_of_a_version_goes_when_it_is_released(
    make: Callable[[], Worker], staging: Staging
) -> None:
    worker = make()
    version = staging.stage_files([save(_nudged())])
    assert worker.job("prepare", "two", version, base="base")["patched"] is True
    digests, ready = _known(worker)
    assert ({"base", "two"} >= digests >= {"two"}, ready) == (True, {"two"})
    base = staging.versions[0].staged.segments
    reply = worker.call("release", keep=["base"], segments=list(base))
    # Views of its segments would keep them mapped.
    assert reply["mapped"] == sorted(base)
    digests, ready = _known(worker)
    assert "two" not in digests
    assert ready == set()
