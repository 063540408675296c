"""A rank proves by digests of its own what lies in staging memory, and what is live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.host_kernels import HostKernels
from tests.unit.vllm.worker.test_rank import Worker
from weightsync.gpu.device_kernels import Digests, Kernels, digestible, fits
from weightsync.model.digest import tensor_digest
from weightsync.vllm.cuda import staging_proof
from weightsync.vllm.cuda.cuda_ops import CudaOps
from weightsync.vllm.cuda.scatter import SpanPairs
from weightsync.vllm.cuda.uploader import Uploader
from weightsync.vllm.env import Amount
from weightsync.vllm.worker import worker_methods as worker_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.staging import Staging, Version

Tensors = dict[str, torch.Tensor]

#: In two shards. `odd` is no multiple of 16 bytes, so that what follows it in a block is at none.
_SHAPES = {"wide": (8, 16), "odd": (81,), "after": (80,), "tiny": (3,)}
_FILES = (("wide", "tiny"), ("odd", "after"))


class _Model(torch.nn.Module):
    """Copies whole tensors; `odd` and `after` are fused."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide, self.fused, self.tiny = (
            torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            for shape in ((8, 16), (161,), (3,))
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            places = {"odd": self.fused.data[:81], "after": self.fused.data[81:]}
            target = places.get(name, getattr(self, name, self.tiny).data)
            target.copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    found = HostKernels()
    monkeypatch.setattr(Kernels, "find", lambda _: found)
    return found


@pytest.fixture
def make(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, kernels: HostKernels
) -> Callable[..., Worker]:
    def made(dtype: torch.dtype = torch.float32) -> Worker:
        cpu = torch.device("cpu")
        monkeypatch.setattr(worker_, "_device_ops", lambda *_: CudaOps(cpu, Amount(1 << 20), 1.0))
        model = _Model(dtype)
        model.load_weights(_tensors(1).items())
        found = Worker(model, staging)
        found.adopt(_staged(staging, 1))
        kernels.ran.clear()
        return found

    return made


def _tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}


def _staged(staging: Staging, seed: int) -> Version:
    tensors = _tensors(seed)
    return staging.stage_files([save({n: tensors[n] for n in names}) for names in _FILES])


def test_digests_are_those_of_the_bytes(kernels: HostKernels) -> None:
    tensors = [torch.randn(size) for size in (61, 64, 1000, 70_001)]
    digests = Digests(kernels, tensors)
    digests.queue(0, 2)
    digests.queue(2, 4)
    assert digests.results() == [tensor_digest(tensor.numpy().data) for tensor in tensors]


def test_what_the_kernel_cannot_digest_is_told() -> None:
    row = torch.zeros(1000)
    assert digestible(row)
    assert digestible(row[4:])
    assert not digestible(row[:60])
    assert not digestible(row[1:])
    assert not digestible(row.view(10, 100)[:, :80])


def test_spans_copy_and_compare_every_byte(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.gpu.device_kernels.SPAN", 64)
    sizes = (1, 16, 63, 64, 65, 1000)
    live = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    wanted = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    spans = SpanPairs(kernels, list(zip(live, wanted, strict=True)))
    spans.compare()
    assert spans.unequal() == [0, 1, 2, 3, 4, 5]
    spans.copies[0].queue()
    spans.compare()
    assert 0 < len(spans.unequal()) < 6, "both launches copy a part"
    for copy in spans.copies:
        copy.queue()
    spans.compare()
    assert spans.unequal() == []
    assert all(torch.equal(a, b) for a, b in zip(live, wanted, strict=True))
    live[4][64] ^= 1
    live[5][999] ^= 1
    spans.compare()
    assert spans.unequal() == [4, 5]


def test_what_is_no_span_is_told() -> None:
    row = torch.zeros(64)
    assert fits(row, row)
    assert fits(row[4:], row[8:])
    assert not fits(row[1:], row[1:])
    assert not fits(row[4:], row[3:])
    assert not fits(row.view(8, 8)[:, :4], row.view(8, 8)[:, :4])
    assert not fits(row[:0], row[:0])


def test_a_rank_proves_every_shard_that_it_has_whole(
    make: Callable[..., Worker], staging: Staging, kernels: HostKernels
) -> None:
    worker, second = make(), _staged(staging, 2)
    report = worker.job("prepare", "two", second, base="base")
    assert (report["phase"], report["shards"], report["unlike"]) == ("ready", [0, 1], [])
    # Each block when it has come; `after` begins at no multiple of 16 bytes, and is fetched.
    assert kernels.ran.count("digest_texts") == 2
    assert worker.call("commit", apply_id="two")["ok"]
    kernels.ran.clear()
    assert worker.job("verify", "two")["proved"] is True
    assert kernels.ran == ["digest_texts"]


def test_a_large_tensor_that_it_cannot_digest_is_left_to_the_server(
    make: Callable[..., Worker], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_proof, "_FETCHED", 16)
    report = make().job("prepare", "two", _staged(staging, 2), base="base")
    assert (report["shards"], report["unlike"]) == ([0], [])


@pytest.mark.parametrize("name", ["wide", "after", "tiny"])
def test_what_arrived_otherwise_is_named(
    make: Callable[..., Worker], staging: Staging, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    worker, second = make(), _staged(staging, 2)
    send = Uploader.send

    def damaged(self: Uploader, target: torch.Tensor, source: torch.Tensor) -> None:
        send(self, target, source)
        if torch.equal(source.reshape(-1), _tensors(2)[name].reshape(-1)):
            target.view(torch.int32).reshape(-1)[-1] ^= 1

    with monkeypatch.context() as patched:
        patched.setattr(Uploader, "send", damaged)
        report = worker.job("prepare", "two", second, base="base")
    assert report["unlike"] == [name]
    assert report["shards"] == [0 if name == "after" else 1]


def test_damage_that_came_after_it_was_received_is_named(
    make: Callable[..., Worker], staging: Staging
) -> None:
    second = _staged(staging, 2)
    second.tensor_bytes("wide")[5] ^= 1
    assert make().job("prepare", "two", second, base="base")["unlike"] == ["wide"]


def test_the_live_parameters_are_digested_where_they_lie(
    make: Callable[..., Worker], staging: Staging
) -> None:
    worker, second = make(), _staged(staging, 2)
    worker.job("prepare", "two", second, base="base")
    assert worker.call("commit", apply_id="two")["ok"]
    worker.model.fused.data.view(torch.int32)[80] ^= 1
    report = worker.job("verify", "two")
    assert (report["proved"], report["mismatched"]) == (False, ["fused"])


def test_what_is_converted_is_left_to_the_server(
    make: Callable[..., Worker], staging: Staging, kernels: HostKernels
) -> None:
    worker = make(torch.bfloat16)
    told: Any = worker.job("prepare", "two", _staged(staging, 2), base="base")
    assert (told["phase"], "shards" in told, "digest_texts" in kernels.ran) == (
        "ready",
        False,
        False,
    )
    assert worker.call("commit", apply_id="two")["ok"]
    assert "copy_spans" in kernels.ran


def test_what_goes_back_from_host_memory_is_proved_by_digests(
    make: Callable[..., Worker], staging: Staging
) -> None:
    worker, second, third = make(), _staged(staging, 2), _staged(staging, 3)
    worker.job("prepare", "two", second, base="base")
    assert worker.call("commit", apply_id="two")["ok"]
    # Takes the staging memory.
    worker.job("prepare", "three", third, base="two")
    assert worker.call("commit", apply_id="three")["ok"]
    reply = worker.call("commit", apply_id="two")
    assert (reply["ok"], reply["content_digest"]) == (True, second.content_digest)
    # `after` is at no multiple of 16 bytes: it was sent again.
    assert reply["compared_all"] is False
    second.tensor_bytes("wide")[5] ^= 1
    reply = worker.call("commit", apply_id="two")
    assert (reply["ok"], reply["mismatched"]) == (False, ["wide"])
