"""What somebody else has written into live parameters: digested, taken for whole, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker, adopted, give_device
from weightsync.vllm.env import Amount
from weightsync.vllm.worker import live_digests

if TYPE_CHECKING:
    from tests.support.staging import Staging

_NAME = "in place 1"


@pytest.fixture(params=[None, Amount(1 << 20)], ids=["host", "device"])
def rank(staging: Staging, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    give_device(monkeypatch, request.param)
    return adopted(staging, [save(toy_tensors(1))])


def _write(rank: Worker, seed: int) -> None:
    """Write as a trainer does: nobody is told."""
    rank.call("unprove")
    wanted = load_for_real(ToyModel(rank=rank.rank), toy_tensors(seed))
    with torch.no_grad():
        for name, parameter in wanted.named_parameters():
            rank.model.get_parameter(name).copy_(parameter)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_digests, "_PIECE_BYTES", 64)


def test_what_is_digested_is_taken_for_whole(rank: Worker) -> None:
    _write(rank, 2)
    assert rank.call("state")["content_digest"] == ""
    reply = rank.call("digest", apply_id="base", name=_NAME)
    assert (reply["ok"], reply["apply_id"], reply["content_digest"]) == (True, "base", _NAME)
    assert reply["parts"] == {}
    state = rank.call("state")
    assert (state["content_digest"], state["dirty"], state["apply_id"]) == (_NAME, False, "")


def test_it_is_a_version_once_it_was_compared_with_one(rank: Worker, staging: Staging) -> None:
    _write(rank, 2)
    rank.call("digest", apply_id="base", name=_NAME)
    second = staging.stage_files([save(toy_tensors(2))])
    rank.job("prepare", "two", second)
    assert rank.job("verify", "two")["proved"] is True
    state = rank.call("state")
    assert (state["apply_id"], state["content_digest"]) == ("two", second.content_digest)
    # What comes after it is compared with the version alone.
    _write(rank, 1)
    assert rank.job("verify", "base")["proved"] is True


def test_what_changed_since_is_found_though_it_was_pushed(rank: Worker, staging: Staging) -> None:
    _write(rank, 2)
    rank.call("digest", apply_id="base", name=_NAME)
    tensors = toy_tensors(2)
    tensors["head"].view(-1)[0] += 1
    rank.model.head.data.view(-1)[0] += 1
    rank.job("prepare", "two", staging.stage_files([save(tensors)]))
    report = rank.job("verify", "two")
    assert (report["proved"], report["mismatched"]) == (False, ["head"])
    state = rank.call("state")
    assert (state["content_digest"], state["dirty"]) == ("", True)
    assert rank.call("commit", apply_id="base")["ok"] is True
    assert rank.job("verify", "base")["proved"] is True


def test_ranks_call_the_same_part_the_same(staging: Staging) -> None:
    files = [save(toy_tensors(1))]
    ranks = [adopted(staging, files, rank=number) for number in range(2)]
    for rank in ranks:
        _write(rank, 1)
    parts = [r.call("digest", apply_id="base", name=_NAME, parts=True)["parts"] for r in ranks]
    same = parts[0].keys() & parts[1].keys()
    assert same
    assert all(parts[0][part] == parts[1][part] for part in same)
    whole = {part.split(" ")[0] for part in parts[0]}
    assert whole <= toy_tensors(1).keys()
    ranks[1].model.head.data.view(-1)[0] += 1
    changed = ranks[1].call("digest", apply_id="base", name=_NAME, parts=True)["parts"]
    assert [part.split(" ")[0] for part in same if changed[part] != parts[0][part]] == ["head"]


def test_without_a_load_plan_nobody_writes(rank: Worker) -> None:
    reply = rank.call("digest", apply_id="unknown", name=_NAME)
    assert reply["ok"] is False
    assert "unknown" in reply["error"]
