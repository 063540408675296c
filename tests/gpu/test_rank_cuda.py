"""One rank with its parameters on a CUDA device: exact, at the same addresses, and proved."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.staging import Staging
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.test_rank import Worker
from weightsync.vllm import changes as changes_
from weightsync.vllm import patch
from weightsync.vllm.words import memory_of, words_of
from weightsync.vllm.writing import differ, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightsync.vllm.crew import Crew

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


def _nudged(seed: int, *names: str) -> dict[str, torch.Tensor]:
    """Return a version in which one element of each named tensor differs by one bit."""
    made = {name: tensor.clone() for name, tensor in toy_tensors(seed).items()}
    for name in names:
        words_of(made[name]).reshape(-1)[1] ^= 1
    return made


def _holds(worker: Worker, tensors: dict[str, torch.Tensor], dtype: Any) -> bool:
    wanted = load_for_real(ToyModel(rank=worker.rank, dtype=dtype), tensors)
    return all(
        torch.equal(worker.model.get_parameter(name).cpu(), parameter)
        for name, parameter in wanted.named_parameters()
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patch_its_rollback_and_a_restore_in_full(
    staging: Staging, rank: int, dtype: Any
) -> None:
    worker = _worker(staging, rank, dtype)
    tensors = _nudged(1, "embed", "head", "q", "k", "down")
    # More than a nudge survives rounding; all of this slice goes as a copy.
    tensors["k"] += 1
    tensors["down"][:, ::4] += 1
    first, second = (staging.stage_files([save(each)]) for each in (toy_tensors(1), tensors))
    worker.adopt(first)
    addresses = {name: p.data_ptr() for name, p in worker.model.named_parameters()}
    assert worker.job("prepare", "two", second, base="base")["patched"] is True
    reply = worker.call("commit", apply_id="two")
    assert (reply["patched"], reply["content_digest"]) == (True, second.content_digest)
    assert _holds(worker, tensors, dtype)
    assert worker.job("verify", "two", gives_way=True)["proved"] is True
    assert worker.job("prepare", "back", first, base="two")["patched"] is True
    assert worker.call("commit", apply_id="back")["patched"] is True
    assert _holds(worker, toy_tensors(1), dtype)
    assert worker.job("prepare", "again", second, base="back")["patched"] is True
    worker.model.embed.data.view(torch.uint8)[0, 0] ^= 1
    assert worker.job("verify", "back")["proved"] is False
    reply = worker.call("commit", apply_id="again")
    assert (reply["patched"], reply["ok"]) == (False, True)
    assert _holds(worker, tensors, dtype)
    assert {name: p.data_ptr() for name, p in worker.model.named_parameters()} == addresses


def test_an_element_that_does_not_hold_is_found_in_the_pause(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    second = staging.stage_files([save(_nudged(1, "k", "down"))])
    worker.job("prepare", "two", second, base="base")
    write = patch.Patch.write

    def damage(self: patch.Patch, crew: Crew) -> None:
        write(self, crew)
        (change,) = [change for change in self.changes if change.param == "down"]
        self.targets.memory("down")[change.positions.long()] ^= 2

    monkeypatch.setattr(patch.Patch, "write", damage)
    assert worker.call("commit", apply_id="two")["mismatched"] == ["down"]
    assert worker.call("commit", apply_id="base")["ok"]


def test_without_device_memory_everything_is_copied(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: Any) -> None:
        raise torch.OutOfMemoryError

    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    second = staging.stage_files([save(_nudged(1, "k"))])
    monkeypatch.setattr(patch, "_sent", exhausted)
    assert worker.job("prepare", "two", second, base="base")["patched"] is False
    assert worker.call("commit", apply_id="two")["content_digest"] == second.content_digest


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05])
def test_elements_of_large_parameters_are_written_and_compared(share: float) -> None:
    # 2 GiB of bfloat16 in the shapes of a model.
    shapes = [(4096, 4096)] * 8 + [(14336, 4096)] * 8 + [(128256, 4096)] + [(4096,)] * 32
    device = torch.device("cuda", 0)
    params = {
        str(at): torch.randn(shape, device=device).bfloat16() for at, shape in enumerate(shapes)
    }
    wanted, changes = {}, []
    for name, tensor in params.items():
        words = words_of(tensor).reshape(-1)
        places = (torch.rand(words.shape, device=device) < share).nonzero().reshape(-1)
        values = words[places] ^ 1
        wanted[name] = words.clone()
        wanted[name][places] = values
        changes.append(changes_.Change(name, places.int().cpu(), values.cpu()))
    staged = patch.stage(changes, device)
    assert staged is not None
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for change in staged:
        put(memory_of(params[change.param]), change.positions, change.values)
    torch.cuda.synchronize()
    written = time.perf_counter()
    wrong = [differ(memory_of(params[c.param]), c.positions, c.values) for c in staged]
    assert not any(torch.stack(wrong).tolist())
    done = time.perf_counter()
    for name, tensor in params.items():
        assert torch.equal(memory_of(tensor), wanted[name])
    print(  # noqa: T201 - the times are worth reading
        f"{share:.1%} of {sum(t.numel() for t in params.values()) / 1e9:.2f}e9 values: "
        f"written in {(written - begin) * 1e3:.2f} ms, compared in {(done - written) * 1e3:.2f} ms"
    )


def test_parameter_at_another_address_is_refused(staging: Staging) -> None:
    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    kept = worker.model.down
    worker.model.down = torch.nn.Parameter(kept.clone(), requires_grad=False)
    assert "down was replaced" in worker.call("commit", apply_id="base")["error"]
