"""Our kernels on a real device, beside what PyTorch and xxhash make of the same bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.gpu import device_kernels
from weightsync.gpu.device_find import KernelFinder, TorchFinder
from weightsync.gpu.device_kernels import Digests, KernelError, Kernels, Launch, digestible
from weightsync.model.digest import tensor_digest
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.cuda.device_patch import groups_of
from weightsync.vllm.cuda.memory_budget import Block
from weightsync.vllm.cuda.scatter import Scatter, SpanPairs, launch_of
from weightsync.vllm.cuda.staged_write import Staged
from weightsync.vllm.cuda.uploader import StreamThrottle
from weightsync.vllm.plan.load_plan import Strides

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_DEVICE = torch.device("cuda:0")
#: Around the ends of stripes (64 bytes), blocks (1 KiB) and tiles (64 KiB) of the digest.
_SIZES = (
    241, 255, 256, 257, 1000, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 65535, 65536, 65537,
    65600, 66560, 66561, 131072, 131073, 1 << 20, (1 << 20) + 1, 5_000_011,
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = Kernels.find(_DEVICE)
    assert found is not None
    return found


def _random(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(_DEVICE).manual_seed(size + seed)
    return torch.randint(256, (size,), dtype=torch.uint8, device=_DEVICE, generator=generator)


def _wanted(tensor: torch.Tensor) -> bytes:
    return tensor_digest(tensor.cpu().numpy().data)


def test_digests_are_those_of_xxhash(kernels: Kernels) -> None:
    tensors = [_random(size) for size in _SIZES]
    # Within a larger one, and of bytes that are all the same.
    tensors += [_random(100_000)[16:90_000], torch.zeros(70_000, dtype=torch.uint8, device=_DEVICE)]
    assert all(map(digestible, tensors))
    digests = Digests(kernels, tensors)
    digests.queue(0, 3)
    digests.queue(3, len(tensors))
    assert digests.results() == [_wanted(tensor) for tensor in tensors]


@pytest.mark.parametrize("place", [0, 1023, 65536, 1_000_000, 4_999_999])
def test_every_bit_counts(kernels: Kernels, place: int) -> None:
    tensor = _random(5_000_000)
    digests = Digests(kernels, [tensor])
    digests.queue(0, 1)
    before = digests.results()
    tensor[place] ^= 1
    digests.queue(0, 1)
    assert digests.results() != before
    assert digests.results() == [_wanted(tensor)]


@pytest.mark.parametrize("span", [64, 4096, 64 << 10])
def test_spans_are_copied_and_compared(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, span: int
) -> None:
    monkeypatch.setattr(device_kernels, "SPAN", span)
    sizes = (1, 15, 16, 17, 63, 64, 65, 8192, 8193, 65536, 300_001)
    live = [torch.zeros(size + 32, dtype=torch.uint8, device=_DEVICE) for size in sizes]
    wanted = [_random(size) for size in sizes]
    pairs = [(row[16:-16], other) for row, other in zip(live, wanted, strict=True)]
    found = SpanPairs(kernels, pairs)
    found.compare()
    assert found.unequal() == [i for i, other in enumerate(wanted) if bool(other.any())]
    for copy in found.copies:
        copy.queue()
    found.compare()
    assert found.unequal() == []
    for (left, right), row in zip(pairs, live, strict=True):
        assert torch.equal(left, right)
        assert not row[:16].any(), "written before the beginning"
        assert not row[-16:].any(), "written beyond the end"
    for index, (left, _) in enumerate(pairs):
        left[-1] ^= 1
        found.compare()
        assert found.unequal() == [index]
        left[-1] ^= 1


def test_a_kernel_that_there_is_not_is_told(kernels: Kernels) -> None:
    with pytest.raises(KernelError, match="cuModuleGetFunction answered"):
        Launch(kernels, "there_is_none", (1, 1), [])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_changes_are_those_that_torch_finds(
    kernels: Kernels, dtype: torch.dtype, share: float
) -> None:
    sizes = (1, 7, 63, 64, 65, 4096, 32767, 32768, 32769, 100_000, 3_000_001)
    blocks, at = [], 0
    for size in sizes:
        blocks.append(Block("row", dtype, Strides(at // dtype.itemsize, (size,), (1,)), at))
        at += -(-size * dtype.itemsize // 16) * 16
    live = _random(at)
    memory = live.clone()
    words = as_ints(memory.view(dtype))
    words[torch.rand(len(words), device=_DEVICE) < share] ^= 1
    targets: Any = SimpleNamespace(param=lambda _: live.view(dtype))
    mask = torch.zeros(4 << 20, dtype=torch.bool, device=_DEVICE)
    staged = Staged(targets, blocks, memory, mask, kernels)
    chosen = [index != 5 for index in range(len(sizes))]
    found = []
    plain = Staged(targets, blocks, memory, mask)
    (ours,), (torchs,) = groups_of(staged, blocks), groups_of(plain, blocks)
    assert (type(ours.finder), type(torchs.finder)) == (KernelFinder, TorchFinder)
    row = as_ints(live.view(dtype))
    for finder in (ours.finder, torchs.finder):
        counts = finder.count(StreamThrottle(_DEVICE).step)
        some = sum(c for c, wanted in zip(counts, chosen, strict=True) if wanted)
        positions = torch.full((some + 9,), -1, device=_DEVICE)
        values = torch.zeros(some + 9, dtype=words.dtype, device=_DEVICE)
        own = positions[4:-5], values[4:-5]
        assert not finder.take(chosen, row.data_ptr(), *own, StreamThrottle(_DEVICE).step).item()
        found.append((counts, positions.tolist(), values.tolist()))
    assert found[0] == found[1]
    assert (sum(found[0][0]) > 0) == (share > 0)
    scatter = Scatter(row, positions[4:-5], values[4:-5], values, values)
    launch = launch_of(kernels, scatter.row, scatter.positions, scatter.values)
    if launch is not None:
        launch.queue()
    for block, wanted in zip(blocks, chosen, strict=True):
        same = torch.equal(as_ints(block.live(targets)), as_ints(block.staged(memory)))
        assert same or not wanted
