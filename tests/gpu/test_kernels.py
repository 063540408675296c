"""Our kernels on a real device, beside what PyTorch and xxhash make of the same bytes."""

from __future__ import annotations

import pytest
import torch

from weightsync.digest import tensor_digest
from weightsync.vllm.cuda import spans as spans_
from weightsync.vllm.cuda.digests import Digests, digestible
from weightsync.vllm.cuda.kernels import KernelError, Kernels, Launch
from weightsync.vllm.cuda.spans import Spans

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
    monkeypatch.setattr(spans_, "_SPAN", span)
    sizes = (1, 15, 16, 17, 63, 64, 65, 8192, 8193, 65536, 300_001)
    live = [torch.zeros(size + 32, dtype=torch.uint8, device=_DEVICE) for size in sizes]
    wanted = [_random(size) for size in sizes]
    pairs = [(row[16:-16], other) for row, other in zip(live, wanted, strict=True)]
    found = Spans(kernels, pairs)
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
