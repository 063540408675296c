"""Pushes of tensors that live on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.unit.client.servicer import Running, Servicer, start  # noqa: E402 - after the skip
from weightsync.model.digest import content_digest, tensor_digest  # noqa: E402
from weightsync_client import Client  # noqa: E402
from weightsync_client.source.tensors import Scratch, wrap  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "bfloat16", "float32", "float64", "complex64", "float8_e5m2", "float8_e4m3fn",
    "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
]  # fmt: skip


@pytest.fixture
def running() -> Iterator[Running]:
    server = start(Servicer())
    yield server
    server.stop()


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


def raw(tensor: Any) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def read(tensor: Any, step: int = 1 << 20) -> bytes:
    source = wrap("t", tensor)
    reader = source.open(Scratch())
    ends = range(0, source.size, step)
    return b"".join(bytes(reader(begin, min(begin + step, source.size))) for begin in ends)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(33, 65), (), (0, 3)])
def test_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    host = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).reshape(-1)
    tensor = host.view(dtype).reshape(shape).cuda()
    assert read(tensor) == raw(tensor)


def test_strided_tensors_and_ranges_across_blocks() -> None:
    base = torch.randn(4096, 5000, device="cuda")
    for tensor in (base, base.T, base[::3], base[:, 7:4000]):
        assert read(tensor, 3_000_001) == raw(tensor)
    # More than a block at a time.
    assert read(base, 40 << 20) == raw(base)


def test_work_of_the_callers_stream_is_waited_for(client: Client) -> None:
    weight = torch.zeros(64 << 20, device="cuda")
    factor = torch.randn(8192, 8192, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50):
            factor = (factor @ factor).clamp_(-1, 1)
        weight.fill_(7)
        weight[0] = factor[0, 0]
        client.push({"w": weight}, version=1)
    (pulled,) = client.tensors(1)
    assert bytes(pulled.data) == raw(weight)
    assert float(weight[1]) == 7


def test_a_large_state_dict_takes_no_device_memory(client: Client) -> None:
    tensors = {f"l{i}": torch.randn(128 << 20, device="cuda").bfloat16() for i in range(4)}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = client.push(tensors, streams=2, delta="never")
    assert torch.cuda.max_memory_allocated() == before
    assert result.content_digest == content_digest(
        (name, "BF16", tuple(t.shape), tensor_digest(raw(t))) for name, t in tensors.items()
    )
    print(f"{result.size_bytes / result.seconds / 1e9:.2f} GB/s from the device")  # noqa: T201


def test_an_iterable_of_device_tensors_is_not_collected(client: Client) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def tensors() -> Iterator[tuple[str, Any]]:
        for i in range(32):
            yield f"t{i}", torch.full((16 << 20,), float(i), device="cuda")

    client.push(tensors(), shard_bytes=64 << 20, version=1)
    # Of 2 GiB, one tensor and the next: each is copied to the host as it comes.
    assert torch.cuda.max_memory_allocated() - before <= 2 * (64 << 20)
    for pulled in client.tensors(1):
        assert float(pulled.torch()[-1]) == float(pulled.name[1:])
        break


def test_an_iterator_may_use_its_device_memory_again(client: Client) -> None:
    def tensors() -> Iterator[tuple[str, Any]]:
        buffer = torch.empty(2 << 20, device="cuda")
        for i in range(8):
            # Queued behind much else, so that it is not there yet when it is asked for.
            for _ in range(50):
                buffer.add_(1.0)
            yield f"t{i}", buffer.fill_(float(i))

    result = client.push(tensors(), shard_bytes=16 << 20)
    for pulled in client.tensors(result.version):
        values = pulled.torch()
        assert bool((values == float(pulled.name[1:])).all()), pulled.name
