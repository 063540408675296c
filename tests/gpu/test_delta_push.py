"""Deltas of tensors that live on a CUDA device: compared there, and right to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.unit.client.servicer import Running, Servicer, start  # noqa: E402 - after the skip
from weightsync.gpu.device_kernels import DeviceDigests, kernels_of  # noqa: E402
from weightsync.model.digest import content_digest, tensor_digest  # noqa: E402
from weightsync_client import Client, Fallback, PushKind  # noqa: E402
from weightsync_client.snapshot import snapshot  # noqa: E402
from weightsync_client.snapshot.device_tensor import DeviceTensor, find_changed  # noqa: E402
from weightsync_client.snapshot.host_tensor import HostTensor  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def running() -> Iterator[Running]:
    server = start(Servicer())
    yield server
    server.stop()


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


def model(count: int = 4, elements: int = 1 << 22) -> dict[str, Any]:
    return {f"l{i}": torch.randn(elements + i, device="cuda").bfloat16() for i in range(count)}


def step(tensors: dict[str, Any], share: float) -> None:
    for tensor in tensors.values():
        bits = tensor.view(torch.int16)
        bits += (torch.rand(bits.shape, device="cuda") < share).to(torch.int16)


def digest_of(tensors: dict[str, Any]) -> str:
    def raw(tensor: Any) -> bytes:
        return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    return content_digest(
        (name, "BF16", tuple(t.shape), tensor_digest(raw(t))) for name, t in tensors.items()
    )


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
def test_steps_on_the_device(client: Client, share: float) -> None:
    tensors = model()
    client.push(tensors)
    held = client._history.snapshot.current
    assert held is not None
    assert {type(tensor) for tensor in held.tensors.values()} == {DeviceTensor}
    for _ in range(3):
        step(tensors, share)
        # Also where so much changed that all of it would go unasked.
        result = client.push(tensors, delta="require")
        assert result.kind is PushKind.DELTA
        assert result.content_digest == digest_of(tensors)
        assert result.changed_fraction == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_our_kernels_find_what_pytorch_finds(dtype: Any, share: float) -> None:
    kernels = kernels_of(torch.device("cuda", 0))
    assert kernels is not None
    sizes = (1, 7, 1000, 65536, 65537, (1 << 24) + 3)
    old = [torch.randint(0, 100, (n,), device="cuda").to(dtype) for n in sizes]
    pairs = [(t, t + (torch.rand(t.shape, device="cuda") < share).to(dtype)) for t in old]
    differences, flags = find_changed(kernels, pairs)
    assert not any(changed.any() for changed in flags)
    for found, wanted in zip(differences, find_changed(None, pairs)[0], strict=True):
        assert found.index.dtype == wanted.index.dtype
        for name in ("index", "before", "after"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
    tensors = {str(n): new.view(torch.uint8) for n, (_, new) in enumerate(pairs)}
    digests = DeviceDigests(kernels, tensors)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for name in digests.names:
            assert digests.of(name) == tensor_digest(tensors[name].cpu().numpy().data)


def test_without_room_on_the_device_the_host_compares(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_device_room_for", lambda _device, _size: False)
    tensors = model()
    # The first push finds out whether the server copies tensors by itself.
    assert client.push(tensors).fallback_reason is Fallback.FIRST
    assert client.push(tensors).fallback_reason is Fallback.FIRST
    held = client._history.snapshot.current
    assert held is not None
    assert {type(tensor) for tensor in held.tensors.values()} == {HostTensor}
    step(tensors, 0.01)
    result = client.push(tensors)
    assert (result.kind, result.content_digest) == (PushKind.DELTA, digest_of(tensors))


def test_memory_of_the_device_is_one_copy(client: Client) -> None:
    tensors = model(count=8, elements=1 << 25)
    size = sum(tensor.nbytes for tensor in tensors.values())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    client.push(tensors)
    assert torch.cuda.memory_allocated() - before <= 1.01 * size
    step(tensors, 0.01)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    result = client.push(tensors)
    seconds = time.monotonic() - begun
    # Positions and values of what changed, and a mask of one tensor at a time.
    assert torch.cuda.max_memory_allocated() - before <= 1.6 * size
    assert torch.cuda.memory_allocated() - before <= 1.01 * size
    assert result.content_digest == digest_of(tensors)
    print(f"{size / seconds / 1e9:.2f} GB/s compared on the device")  # noqa: T201


def test_work_of_the_callers_stream_is_waited_for(client: Client) -> None:
    weight = torch.zeros(32 << 20, device="cuda")
    factor = torch.randn(8192, 8192, device="cuda")
    client.push({"w": weight})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(50):
            factor = (factor @ factor).clamp_(-1, 1)
        weight[::1000] = 7
        result = client.push({"w": weight})
    raw = bytes(weight.cpu().view(torch.uint8).numpy())
    expected = content_digest([("w", "F32", tuple(weight.shape), tensor_digest(raw))])
    assert (result.kind, result.content_digest) == (PushKind.DELTA, expected)
