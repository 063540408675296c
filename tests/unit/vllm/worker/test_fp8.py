"""Elements of one byte are written, compared and patched as others, on host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker, give_device
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.env import Amount

if TYPE_CHECKING:
    from tests.support.staging import Staging

FP8 = torch.float8_e4m3fn


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return toy_tensors(seed, dtype=FP8)


def _holds(rank: Worker, tensors: dict[str, torch.Tensor]) -> bool:
    wanted = load_for_real(ToyModel(dtype=FP8), tensors)
    return all(
        torch.equal(as_ints(rank.model.get_parameter(name)), as_ints(parameter))
        for name, parameter in wanted.named_parameters()
    )


@pytest.fixture(params=["host", "device", "device without room"])
def rank(
    request: pytest.FixtureRequest, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> Worker:
    rooms = {"host": None, "device": Amount(1 << 20), "device without room": Amount(0)}
    give_device(monkeypatch, rooms[request.param])
    return _adopted(staging)


def _adopted(staging: Staging) -> Worker:
    found = Worker(load_for_real(ToyModel(dtype=FP8), _tensors(1)), staging)
    found.adopt(staging.stage_files([save(_tensors(1))]))
    return found


def test_all_of_it_and_a_patch_and_the_way_back(rank: Worker, staging: Staging) -> None:
    second = _tensors(2)
    version = staging.stage_files([save(second)])
    assert rank.job("prepare", "two", version, base="base")["phase"] == "ready"
    reply = rank.call("commit", apply_id="two")
    assert (reply["content_digest"], reply["patched"]) == (version.content_digest, False)
    assert _holds(rank, second)
    near = {name: tensor.clone() for name, tensor in second.items()}
    # One that is sign and not value, and a NaN.
    as_ints(near["q"])[1, 2] ^= 0x80
    as_ints(near["k"])[0, 3] = 0x7F
    report = rank.job("prepare", "three", staging.stage_files([save(near)]), base="two")
    reply = rank.call("commit", apply_id="three")
    assert reply["ok"], reply
    if report["patched"]:
        assert reply["written_bytes"] == 2
    assert _holds(rank, near)
    assert rank.job("verify", "three")["proved"] is True
    assert rank.call("commit", apply_id="two")["content_digest"] == version.content_digest
    assert _holds(rank, second)


def test_a_flipped_bit_is_found(rank: Worker) -> None:
    as_ints(rank.model.head.data)[3, 1] ^= 1
    report = rank.job("verify", "base")
    assert (report["proved"], report["mismatched"]) == (False, ["head"])


def test_values_of_another_dtype_are_refused_before_they_are_read(staging: Staging) -> None:
    rank = _adopted(staging)
    report = rank.job("prepare", "two", staging.stage_files([save(toy_tensors(2))]))
    assert report["phase"] == "failed"
    assert "neither the dtype of the engine's checkpoint" in report["error"]
    assert "down" in report["names"]
    part = staging.stage_files([save({"down": toy_tensors(2)["down"].bfloat16()})])
    reply = rank.call("check", document=part.document.id)
    assert (reply["ok"], reply["names"]) == (False, ["down"])
