"""What the kernels find, on the host's memory; tests/gpu has the same on a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.host_kernels import HostKernels
from weightsync.gpu import device_kernels
from weightsync.gpu.device_find import KernelFinder, TorchFinder
from weightsync.gpu.device_kernels import DeviceDigests, KernelError, NvrtcError, fits, kernels_of
from weightsync.model.digest import tensor_digest
from weightsync_client import Client, InvalidError, PushKind
from weightsync_client.push.push_history import Warmup
from weightsync_client.snapshot import device_tensor, snapshot
from weightsync_client.snapshot.device_tensor import find_changed

if TYPE_CHECKING:
    from weightsync.gpu.device_find import Pair

_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have spans of 64 bytes."""
    monkeypatch.setattr(device_kernels, "SPAN", 64)


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
    differences, flags = find_changed(HostKernels(), given)
    assert not any(changed.any() for changed in flags)
    for found, wanted in zip(differences, find_changed(None, given)[0], strict=True):
        for ours, theirs in zip(_parts(found), _parts(wanted), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("missing", [False, True], ids=["static", "plain"])
def test_pieces_are_taken_together_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch, own: bool, missing: bool
) -> None:
    def not_there(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(device_tensor, "_PIECE", 1024)
    monkeypatch.setattr(device_tensor, "_AT_ONCE", 600)
    if missing:
        monkeypatch.setattr(torch, "nonzero_static", not_there)
    taken: list[int] = []
    finder = KernelFinder if own else TorchFinder
    take = finder.take

    def noted(self: Any, chosen: Any, row: int, positions: torch.Tensor, *rest: Any) -> Any:
        taken.append(len(positions))
        return take(self, chosen, row, positions, *rest)

    monkeypatch.setattr(finder, "take", noted)
    given = pairs(0.3)
    found, _ = find_changed(HostKernels() if own else None, given)
    for (old, new), difference in zip(given, found, strict=True):
        index = torch.nonzero(old != new).reshape(-1)
        assert torch.equal(difference.index.long(), index)
        assert torch.equal(difference.before, old[index])
        assert torch.equal(difference.after, new[index])
    assert sum(taken) == sum(len(difference.index) for difference in found)
    assert max(taken) <= 600
    assert 10 < len(taken) < len(given)


@pytest.mark.parametrize("missing", [False, True], ids=["static", "plain"])
@pytest.mark.parametrize("after", [0, 1])
def test_what_changes_meanwhile_is_told_by_pytorch_too(
    monkeypatch: pytest.MonkeyPatch, missing: bool, after: int
) -> None:
    def not_there(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    if missing:
        monkeypatch.setattr(torch, "nonzero_static", not_there)
    old = torch.zeros(1000, dtype=torch.int16)
    new = old.clone()
    new[::7] = 1
    finder = TorchFinder([(old, new)], torch.empty(1000, dtype=torch.bool))
    (count,) = finder.count(lambda _: None)
    new[7:500] = after
    positions = torch.full((count,), -1)
    values = torch.full((count,), -1, dtype=torch.int16)
    row = old.data_ptr()
    assert finder.take([True], row, positions, values, lambda _: None).item() != 0
    assert torch.equal(values, new[positions])


def _parts(difference: Any) -> list[torch.Tensor]:
    return [difference.index, difference.before, difference.after]


def test_what_changes_meanwhile_is_told_and_no_place_lies_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = torch.zeros(1000, dtype=torch.int16)
    new = old.clone()
    new[::7] = 1
    counted = KernelFinder.count

    def count_and_write(*given: Any) -> Any:
        found = counted(*given)
        new[7:500] = 0
        return found

    monkeypatch.setattr(KernelFinder, "count", count_and_write)
    (found,), (changed,) = find_changed(HostKernels(), [(old, new)])
    assert changed.item()
    assert int(found.index.max()) < 1000


def test_what_the_kernels_cannot_look_at_pytorch_does(ours: HostKernels) -> None:
    store = torch.arange(2000, dtype=torch.int16)
    odd, even = store[1:1000], store[1000:]
    assert [fits(t, t) for t in (odd, even)] == [False, True]
    given = [(tensor.clone(), tensor) for tensor in (odd, even)]
    given.insert(1, (store[:0], store[:0]))
    odd[5], even[3] = -1, -2
    found, flags = find_changed(ours, given)
    assert [d.index.tolist() for d in found] == [[5], [], [3]]
    assert [d.after.tolist() for d in found] == [[-1], [], [-2]]
    flags += find_changed(None, given)[1]
    assert flags
    assert not any(flags)


def test_pytorch_tells_too_that_a_tensor_was_written_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)
    new[::7] = 1
    count = TorchFinder.count

    def count_and_write(self: TorchFinder, step: Any) -> Any:
        found = count(self, step)
        new[:] = 0
        return found

    monkeypatch.setattr(TorchFinder, "count", count_and_write)
    (found,), flags = find_changed(None, [(old, new)])
    assert any(flags)
    assert int(found.index.max()) < 1000


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
    monkeypatch.setattr(snapshot, "roomy", lambda _tensors: (frozenset({None}), True))
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
    monkeypatch.setattr(snapshot, "roomy", lambda _tensors: (frozenset({None}), True))
    tensors = {"a": torch.zeros(5000, dtype=torch.int16)}
    client.push(tensors)
    tensors["a"][::50] = 1
    counted = KernelFinder.count

    def count_and_write(*given: Any) -> Any:
        found = counted(*given)
        tensors["a"][:2500] = 0
        return found

    monkeypatch.setattr(KernelFinder, "count", count_and_write)
    with pytest.raises(InvalidError, match="changed while they were compared; change them once"):
        client.push(tensors)
    monkeypatch.undo()
    assert client.push(tensors).kind is PushKind.DELTA


def test_what_kernels_refuse_pytorch_does(
    client: Client, ours: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise KernelError("cuLaunchKernel answered 2")

    monkeypatch.setattr(snapshot, "roomy", lambda _tensors: (frozenset({None}), True))
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
    warmth = Warmup()
    for _ in range(2):
        warmth.start({torch.device("cuda:5"), torch.device("xpu:0")})
    assert warmth._thread is not None
    warmth._thread.join()
    assert asked == [(9, 5)]
