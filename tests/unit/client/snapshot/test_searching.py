"""What the kernels find, on the host's memory; tests/gpu has the same on a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.host_kernels import HostKernels
from weightsync.gpu import device_kernels, spans
from weightsync.gpu.device_kernels import KernelError
from weightsync.gpu.nvrtc import NvrtcError
from weightsync.gpu.spans import fits
from weightsync.model.digest import tensor_digest
from weightsync_client import Client, InvalidError, PushKind
from weightsync_client.push.warmup import Warmup, compile_codec
from weightsync_client.snapshot import device_tensor, searching, snapshot_store
from weightsync_client.snapshot.differing import differing
from weightsync_client.snapshot.searching import DeviceDigests, kernels_of, search

if TYPE_CHECKING:
    from weightsync_client.snapshot.searching import Pair

_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have spans of 64 bytes."""
    monkeypatch.setattr(spans, "SPAN", 64)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    """Have the host's memory searched by kernels."""
    kernels = HostKernels()
    monkeypatch.setattr(device_tensor, "kernels_of", lambda _: kernels)
    return kernels


def pairs(share: float) -> list[Pair]:
    random = torch.Generator().manual_seed(1)
    made = []
    for dtype in _DTYPES:
        for count in (1, 15, 16, 17, 63, 64, 65, 1000, 4097):
            old = torch.randint(0, 100, (count,), generator=random).to(dtype)
            hit = torch.rand(count, generator=random) < share
            made.append((old, old + hit.to(dtype)))
    return made


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_the_kernels_find_what_pytorch_finds(share: float) -> None:
    given = [pair for pair in pairs(share) if fits(*pair)]
    assert len(given) == 36, "torch aligns its memory"
    searched = search(HostKernels(), given)
    assert not searched.changed.any()
    for found, wanted in zip(searched.differences, differing(given), strict=True):
        for ours, theirs in zip(_parts(found), _parts(wanted), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def _parts(difference: Any) -> list[torch.Tensor]:
    return [difference.index, difference.before, difference.after]


def test_what_changes_meanwhile_is_told_and_no_place_lies_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = torch.zeros(1000, dtype=torch.int16)
    new = old.clone()
    new[::7] = 1
    counted = searching._counted

    def count_and_write(*given: Any) -> Any:
        found = counted(*given)
        new[7:500] = 0
        return found

    monkeypatch.setattr(searching, "_counted", count_and_write)
    searched = search(HostKernels(), [(old, new)])
    assert searched.changed.item()
    assert int(searched.differences[0].index.max()) < 1000


def test_what_the_kernels_cannot_look_at_pytorch_does(ours: HostKernels) -> None:
    store = torch.arange(2000, dtype=torch.int16)
    odd, even = store[1:1000], store[1000:]
    assert [fits(t, t) for t in (odd, even)] == [False, True]
    given = [(tensor.clone(), tensor) for tensor in (odd, even)]
    given.insert(1, (store[:0], store[:0]))
    odd[5], even[3] = -1, -2
    found, flags = device_tensor._found(ours, given)
    assert [d.index.tolist() for d in found] == [[5], [], [3]]
    assert [d.after.tolist() for d in found] == [[-1], [], [-2]]
    assert len(flags) == 1
    assert device_tensor._found(None, given)[1] == []


def test_digests_are_given_to_many_threads_and_computed_once(ours: HostKernels) -> None:
    tensors = {str(n): torch.randint(0, 255, (n,)).to(torch.uint8) for n in (5, 240, 241, 9999)}
    digests = DeviceDigests(ours, tensors)
    assert digests.names == {"241", "9999"}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(digests.of, ["241", "9999"] * 8))
    assert found == [tensor_digest(tensors[name].numpy().data) for name in ("241", "9999")] * 8
    assert ours.ran == ["digest_texts"]
    assert DeviceDigests(ours, {}).names == frozenset()


def test_a_push_that_kernels_compare_is_that_of_pytorch(
    client: Client, servicer: Any, ours: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "roomy", lambda _tensors: (frozenset({None}), True))
    tensors = {str(n): torch.randn(1000 + n).to(torch.bfloat16) for n in range(8)}
    tensors |= {"few": torch.randn(3), "wide": torch.randn(999), "none": torch.zeros(0)}
    client.push(tensors)
    for number in range(3):
        for tensor in tensors.values():
            tensor[number::17] += 1
        ours.ran.clear()
        result = client.push(tensors)
        assert result.kind is PushKind.DELTA
        assert {"take_changes_16", "take_changes_32", "digest_texts"} <= set(ours.ran)
        upload = next(u for u in servicer.uploads.values() if u.version == result.version)
        entries, digests = upload.manifest.layout.tensors, upload.manifest.digests
        for entry, digest in zip(entries, digests, strict=True):
            data = tensors[entry.name].view(torch.uint8).numpy()
            assert digest == tensor_digest(data.data), entry.name


@pytest.mark.usefixtures("ours")
def test_a_push_of_what_changes_meanwhile_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_store, "roomy", lambda _tensors: (frozenset({None}), True))
    tensors = {"a": torch.zeros(5000, dtype=torch.int16)}
    client.push(tensors)
    tensors["a"][::50] = 1
    counted = searching._counted

    def count_and_write(*given: Any) -> Any:
        found = counted(*given)
        tensors["a"][:2500] = 0
        return found

    monkeypatch.setattr(searching, "_counted", count_and_write)
    with pytest.raises(InvalidError, match="changed while they were compared; change them once"):
        client.push(tensors)
    monkeypatch.undo()
    assert client.push(tensors).kind is PushKind.DELTA


def test_what_kernels_refuse_pytorch_does(
    client: Client, ours: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise KernelError("cuLaunchKernel answered 2")

    monkeypatch.setattr(snapshot_store, "roomy", lambda _tensors: (frozenset({None}), True))
    tensors = {"a": torch.zeros(5000, dtype=torch.int16), "b": torch.zeros(5000)}
    client.push(tensors)
    queue = ours.queue
    for at in (1, 2, 3, 4, 5):
        tensors["a"][at::50] += 1
        left = [at]

        def some(*given: Any, left: list[int] = left) -> None:
            left[0] -= 1
            queue(*given) if left[0] else refuse()

        monkeypatch.setattr(ours, "queue", some)
        result = client.push(tensors)
        assert (result.kind, left[0] <= 0) == (PushKind.DELTA, at < 5), at


def test_kernels_are_compiled_beforehand_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_of(torch.device("cpu")) is None
    asked: list[Any] = []

    def compile_it(*given: Any) -> bytes:
        asked.append(given[-1])
        raise NvrtcError("no compiler")

    monkeypatch.setattr(device_kernels, "compile_source", compile_it)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    warmth = Warmup(compile_codec)
    for _ in range(2):
        warmth.start([torch.device("cuda:5"), torch.device("xpu:0")])
    assert warmth._thread is not None
    warmth._thread.join()
    assert asked == [(9, 5)]
