"""One rank with its parameters on a CUDA device: exact, at the same addresses, and proved."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.staging import Staging
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync.gpu.device_kernels import Kernels
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.cuda import cuda_ops as device_
from weightsync.vllm.cuda import device_patch
from weightsync.vllm.cuda.cuda_runtime import Runtime
from weightsync.vllm.cuda.memory_budget import MemoryBudget
from weightsync.vllm.cuda.scatter import Scatters
from weightsync.vllm.env import Amount
from weightsync.vllm.plan.int_views import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_ROOMS = ("1GiB", "0")


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    stage = Staging(tmp_path / "segments.sock")
    yield stage
    stage.close()


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every rank room, and let a few elements of a toy model be few enough for a patch."""
    monkeypatch.setenv("WEIGHTSYNC_DEVICE_ROOM", "1GiB")
    monkeypatch.setattr(device_patch, "_WORTH", 1)
    monkeypatch.setattr(device_patch, "_DENSE", 2)


def _worker(staging: Staging, rank: int, dtype: Any) -> Worker:
    model = load_for_real(ToyModel(rank=rank, dtype=dtype), toy_tensors(1)).cuda()
    worker = Worker(model, staging, rank)
    worker.device = torch.device("cuda", 0)
    return worker


def _addresses(worker: Worker) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in worker.model.named_parameters()}


def test_the_runtime_is_found_and_segments_are_registered(staging: Staging) -> None:
    assert Runtime.find() is not None
    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    registrar = worker._weightsync_rank._ops.registrar  # type: ignore[attr-defined]
    assert (registrar.refused, len(registrar._registered)) == ("", 1)
    worker.call("release", keep=[], segments=[])
    deadline = time.monotonic() + 10
    while worker.call("release", keep=[], segments=[])["mapped"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not registrar._registered


@pytest.mark.parametrize("room", _ROOMS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_restore_and_catch_a_flipped_bit(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, room: str, rank: int, dtype: Any
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_DEVICE_ROOM", room)
    worker = _worker(staging, rank, dtype)
    first = staging.stage_files([save(toy_tensors(1))])
    second = staging.stage_files([save(toy_tensors(2))])
    worker.adopt(first)
    addresses = _addresses(worker)
    report = worker.job("prepare", "two", second, base="base")
    assert (report["phase"], report["error"]) == ("ready", "")
    reply = worker.call("commit", apply_id="two")
    assert reply["content_digest"] == second.content_digest
    assert reply["compared_all"] is False
    wanted = load_for_real(ToyModel(rank=rank, dtype=dtype), toy_tensors(2))
    for name, parameter in wanted.named_parameters():
        assert torch.equal(worker.model.get_parameter(name).cpu(), parameter)
    assert _addresses(worker) == addresses
    assert worker.job("verify", "two")["proved"] is True
    worker.model.down.data.view(torch.uint8)[0, 0] ^= 1
    assert worker.job("verify", "two")["mismatched"] == ["down"]
    assert worker.call("commit", apply_id="base")["content_digest"] == first.content_digest


def _nudged(seed: int, *names: str) -> dict[str, torch.Tensor]:
    """Return a version in which one element of each named tensor differs by one bit."""
    made = {name: tensor.clone() for name, tensor in toy_tensors(seed).items()}
    for name in names:
        as_ints(made[name]).reshape(-1)[0] ^= 1 << 20
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
    first, second = (staging.stage_files([save(each)]) for each in (toy_tensors(1), tensors))
    worker.adopt(first)
    addresses = _addresses(worker)
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
    assert _addresses(worker) == addresses


def test_an_element_that_does_not_hold_is_found_in_the_pause(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    second = staging.stage_files([save(_nudged(1, "k", "down"))])
    assert worker.job("prepare", "two", second, base="base")["patched"] is True
    write = device_patch.DevicePatch.write

    def damage(self: device_patch.DevicePatch, threads: Any) -> None:
        write(self, threads)
        as_ints(worker.model.down.data)[0, 0] ^= 2

    monkeypatch.setattr(device_patch.DevicePatch, "write", damage)
    assert worker.call("commit", apply_id="two")["mismatched"] == ["down"]
    assert worker.call("commit", apply_id="base")["ok"]


def test_without_device_memory_everything_is_sent(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*arguments: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError

    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    second = staging.stage_files([save({**toy_tensors(2), "q": torch.ones(4, 4)})])
    worker._weightsync_rank._ops._arena._memory = None  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr("weightsync.vllm.cuda.memory_budget.torch.empty", exhausted)
        assert worker.job("prepare", "two", second, base="base")["patched"] is False
    reply = worker.call("commit", apply_id="two")
    assert (reply["content_digest"], reply["compared_all"]) == (second.content_digest, False)
    assert reply["h2d_bytes"] > 0


@pytest.mark.parametrize("own", [True, False], ids=["own", "torch"])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.03])
def test_elements_of_large_parameters_are_written_and_compared(share: float, own: bool) -> None:
    # 3 GB of bfloat16 in the shapes of a model: positions are beyond 31 bits.
    shapes = [(4096, 4096)] * 8 + [(14336, 4096)] * 8 + [(128256, 4096)] * 2 + [(4096,)] * 32
    device = torch.device("cuda", 0)
    params = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    wanted, places = [], []
    for tensor in params:
        words = as_ints(tensor).reshape(-1)
        places.append((torch.rand(words.shape, device=device) < share).nonzero().reshape(-1))
        wanted.append(words.clone())
        wanted[-1][places[-1]] ^= 1
    count = sum(place.numel() for place in places)
    kernels = Kernels.find(device) if own else None
    room = MemoryBudget(device, Amount(40 << 30), 1.0)
    made = Scatters(room, device, kernels).make(params, {2: count})
    assert made is not None
    scatter = made[2]
    first = [scatter.place(memory_of(tensor)) for tensor in params]
    torch.cat([at + begin for at, begin in zip(places, first, strict=True)], out=scatter.positions)
    torch.cat([w[at] for w, at in zip(wanted, places, strict=True)], out=scatter.values)
    assert bool(scatter.differs())
    torch.cuda.synchronize()
    begin = time.perf_counter()
    scatter.write()
    torch.cuda.synchronize()
    written = time.perf_counter()
    assert not bool(scatter.differs())
    done = time.perf_counter()
    for tensor, words in zip(params, wanted, strict=True):
        assert torch.equal(memory_of(tensor), words)
    elements = sum(math.prod(shape) for shape in shapes)
    print(  # noqa: T201 - the times are worth reading
        f"{share:.1%} of {elements / 1e9:.2f}e9 values: "
        f"written in {(written - begin) * 1e3:.2f} ms, compared in {(done - written) * 1e3:.2f} ms"
    )


def test_parameter_at_another_address_is_refused(staging: Staging) -> None:
    worker = _worker(staging, 0, torch.float32)
    worker.adopt(staging.stage_files([save(toy_tensors(1))]))
    kept = worker.model.down
    worker.model.down = torch.nn.Parameter(kept.clone(), requires_grad=False)
    assert "down was replaced" in worker.call("commit", apply_id="base")["error"]


class Large(torch.nn.Module):
    """Fuses two tensors and cuts the columns of a third, as rank `rank` of 2."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        make = torch.nn.Parameter
        self.fused = make(torch.zeros(16384, 4096, dtype=torch.bfloat16), requires_grad=False)
        self.down = make(torch.zeros(4096, 8192, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            loaded.add(name)
            if name == "down":
                self.down.data.copy_(tensor.narrow(1, 8192 * self.rank, 8192))
            else:
                begin = 8192 * int(name)
                self.fused.data[begin : begin + 8192].copy_(tensor[8192 * self.rank :][:8192])
        return loaded


def _large(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0": (16384, 4096), "1": (16384, 4096), "down": (4096, 16384)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


@pytest.mark.parametrize("room", ["4GiB", "0"])
def test_half_of_a_model_crosses_the_bus_once(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    monkeypatch.setattr(device_patch, "_WORTH", 32)
    monkeypatch.setattr(device_patch, "_DENSE", 8)
    monkeypatch.setenv("WEIGHTSYNC_DEVICE_ROOM", room)
    first, second = _large(1), _large(2)
    model = Large(1)
    with torch.no_grad():
        model.load_weights(first.items())
    worker = Worker(model.cuda(), staging, 1)
    worker.device = torch.device("cuda", 0)
    worker.adopt(staging.stage_files([save(first)]))
    version = staging.stage_files([save(second)])
    half = sum(tensor.nbytes for tensor in second.values()) // 2
    report = worker.job("prepare", "two", version, base="base")
    reply = worker.call("commit", apply_id="two")
    assert reply["content_digest"] == version.content_digest
    # Without room it is sent once to be written, and once to be compared.
    sent = report["h2d_bytes"] + reply["h2d_bytes"]
    assert sent == half * (2 if room == "0" else 1)
    assert torch.equal(model.down.cpu(), second["down"][:, 8192:])
    assert worker.job("verify", "two")["proved"] is True
    print(  # noqa: T201 - the times are worth reading
        f"{half / 1e9:.2f} GB, room {room}: prepare {report['seconds']:.3f} s, "
        f"commit {reply['commit_s'] * 1e3:.2f} ms, verify {reply['verify_s'] * 1e3:.2f} ms"
    )
    few = {name: tensor.clone() for name, tensor in second.items()}
    for tensor in few.values():
        as_ints(tensor)[::7, 5::100] ^= 1
    version = staging.stage_files([save(few)])
    report = worker.job("prepare", "three", version, base="two")
    reply = worker.call("commit", apply_id="three")
    assert reply["content_digest"] == version.content_digest
    assert reply["patched"] is (room != "0")
    assert worker.job("verify", "three")["proved"] is True
    print(  # noqa: T201 - the times are worth reading
        f"patch of {report['bytes']} bytes, room {room}: prepare {report['seconds']:.3f} s, "
        f"commit {reply['commit_s'] * 1e3:.2f} ms, verify {reply['verify_s'] * 1e3:.2f} ms"
    )
    assert device_._SCRATCH <= 64 << 20
