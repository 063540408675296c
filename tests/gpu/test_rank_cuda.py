"""One rank with its parameters on a CUDA device: exact, at the same addresses, and proved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.staging import Staging
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.test_rank import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    stage = Staging(tmp_path / "segments.sock")
    yield stage
    stage.close()


def _worker(staging: Staging, rank: int, dtype: Any) -> Worker:
    model = load_for_real(ToyModel(rank=rank, dtype=dtype), toy_tensors(1)).cuda()
    worker = Worker(model, staging, rank)
    worker.device = torch.device("cuda", 0)
    return worker


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_restore_and_catch_a_flipped_bit(staging: Staging, rank: int, dtype: Any) -> None:
    worker = _worker(staging, rank, dtype)
    first = staging.stage_files([save(toy_tensors(1))])
    second = staging.stage_files([save(toy_tensors(2))])
    worker.adopt(first)
    addresses = {name: p.data_ptr() for name, p in worker.model.named_parameters()}
    assert worker.job("prepare", "two", second)["phase"] == "ready"
    assert worker.call("commit", apply_id="two")["content_digest"] == second.content_digest
    wanted = load_for_real(ToyModel(rank=rank, dtype=dtype), toy_tensors(2))
    for name, parameter in wanted.named_parameters():
        assert torch.equal(worker.model.get_parameter(name).cpu(), parameter)
    assert {name: p.data_ptr() for name, p in worker.model.named_parameters()} == addresses
    worker.model.down.data.view(torch.uint8)[0, 0] ^= 1
    assert worker.job("verify", "two")["mismatched"] == ["down"]
    assert worker.call("commit", apply_id="base")["content_digest"] == first.content_digest


def test_parameter_at_another_address_is_refused(staging: Staging) -> None:
    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    kept = worker.model.down
    worker.model.down = torch.nn.Parameter(kept.clone(), requires_grad=False)
    assert "down was replaced" in worker.call("commit", apply_id="base")["error"]
