"""Comparing with PyTorch's operations, as on a device; here the device is the host."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.delta import Encoder, encode_shard, parse_shard
from weightsync.errors import WeightSyncError
from weightsync.gpu.device_find import TorchFinder
from weightsync.model.digest import tensor_digest
from weightsync_client import Client, ExhaustedError, Fallback, PushKind, Reason
from weightsync_client.snapshot import device_tensor, snapshot
from weightsync_client.snapshot import host_tensor as held_tensors
from weightsync_client.snapshot.device_tensor import DeviceTensor
from weightsync_client.snapshot.host_tensor import HostTensor
from weightsync_client.snapshot.snapshot import Snapshot
from weightsync_client.source import tensors as source_tensors
from weightsync_client.source.tensors import Scratch, SourceTensor, wrap

_DIGEST = "0" * 32
DTYPES = [
    torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float16,
    torch.float32, torch.int64, torch.complex64,
]  # fmt: skip


def of_bytes(data: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(data.copy()).view(dtype) if len(data) else torch.empty(0, dtype=dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(
    dtype=st.sampled_from(DTYPES),
    elements=st.integers(0, 2000),
    density=st.sampled_from((0.0, 0.002, 0.05, 0.5, 1.0)),
    reach=st.sampled_from((1, 255)),
    seed=st.integers(0, 100),
)
def test_both_ways_make_the_same_shard_and_the_same_copy(
    dtype: torch.dtype, elements: int, density: float, reach: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = elements * dtype.itemsize
    before = rng.integers(0, 2 if dtype == torch.bool else 256, size, np.uint8)
    hit = np.repeat(rng.random(elements) < density, dtype.itemsize)
    flips = rng.integers(0, reach + 1, size).astype(np.uint8)
    after = np.where(hit, before ^ (flips & (1 if dtype == torch.bool else 255)), before)
    old, new = (wrap("w", of_bytes(data, dtype)) for data in (before, after))
    blobs = []
    for held in (HostTensor(old), DeviceTensor(old)):
        held.fill(old, Scratch())
        assert held.digest == tensor_digest(before.data)
        shard = encode_shard(
            [held.item(new, Scratch())],
            zstd=False, base_content_digest=_DIGEST, layout_digest=_DIGEST, index=0,
        )  # fmt: skip
        blobs.append(shard.blob.tobytes())
        assert bytes(held.window(0, size)) == before.tobytes()
        assert shard.stats[0].digest == tensor_digest(after.data)
        changes = parse_shard(shard.blob, {"w": (old.dtype, old.shape)}).changes
        for change in changes.values():
            held.advance(change)
        assert bytes(held.window(0, size)) == after.tobytes()
        assert held.digest == tensor_digest(after.data)
    assert blobs[0] == blobs[1]


def test_what_was_advanced_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {name: torch.randn(999).bfloat16() for name in "abc"}
    new = {name: wrap(name, tensor + 1) for name, tensor in old.items()}
    tensors = {name: DeviceTensor(wrap(name, tensor)) for name, tensor in old.items()}
    for name, tensor in tensors.items():
        tensor.fill(wrap(name, old[name]), Scratch())
    held = Snapshot(1, _DIGEST, 3 * 1998, _DIGEST, "", tensors)
    shard = encode_shard(
        held.items(list(new.values()), Scratch()),
        zstd=False, base_content_digest=_DIGEST, layout_digest=_DIGEST, index=0,
    )  # fmt: skip
    waited: list[list[bytes]] = []
    monkeypatch.setattr(
        snapshot,
        "settle",
        lambda _: waited.append([bytes(t.window(0, 1998)) for t in tensors.values()]),
    )
    held.advance([shard.blob], threads=2)
    # Once, when all was queued.
    assert waited == [[raw(tensor + 1) for tensor in old.values()]]


def test_what_is_held_here_of_a_device_is_read_by_the_threads_that_encode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every way: sparse, dense, unchanged, empty; and more of them than threads, in one memory."""
    rng = np.random.default_rng(3)
    old = {f"t{n}": rng.integers(0, 256, 1 << 14, np.uint8) for n in range(40)} | {
        "none": np.empty(0, np.uint8)
    }
    new = {name: data.copy() for name, data in old.items()}
    for number in range(30):
        new[f"t{number}"][:: 1 + 5 * (number % 7)] ^= 1
    readers: set[int] = set()

    def lying_elsewhere(name: str, data: np.ndarray[Any, Any]) -> SourceTensor:
        def open_it(_: Scratch) -> Any:
            readers.add(threading.get_ident())
            return lambda begin, end: data[begin:end].tobytes()

        gpu = torch.device("cuda:0")
        return SourceTensor(name, "U8", data.shape, open_it, device=gpu, in_place=True)

    shards = []
    for wrapped in (lying_elsewhere, wrap):
        held = {name: HostTensor(wrap(name, data)) for name, data in old.items()}
        for name, data in old.items():
            held[name].fill(wrap(name, data), Scratch())
        items = [held[name].item(wrapped(name, data), Scratch()) for name, data in new.items()]
        with Encoder(zstd=False, threads=3) as encoder:
            digests = {"base_content_digest": _DIGEST, "layout_digest": _DIGEST}
            shards.append(encoder.encode_shard(items, index=0, **digests))
    assert shards[0].blob.tobytes() == shards[1].blob.tobytes()
    assert shards[0].stats == shards[1].stats
    assert readers
    assert threading.get_ident() not in readers


def test_memory_of_a_thread_is_used_again_unless_it_is_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_tensors, "_KEPT", 1000)
    monkeypatch.setattr(held_tensors, "_local", threading.local())
    first = held_tensors._own_room(900)
    assert len(first) == 900
    assert np.shares_memory(held_tensors._own_room(500), first)
    assert not np.shares_memory(held_tensors._own_room(1001), first)
    assert np.shares_memory(held_tensors._own_room(900), first)


@pytest.mark.parametrize("missing", [False, True], ids=["static", "plain"])
def test_a_device_is_asked_twice_for_all_tensors(
    monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    def not_there(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(device_tensor, "_PIECE", 1000)
    if missing:
        monkeypatch.setattr(torch, "nonzero_static", not_there)
    waits: list[object] = []
    stacked = torch.stack

    def stack(counts: list[torch.Tensor]) -> torch.Tensor:
        waits.append(counts)
        return stacked(counts)

    monkeypatch.setattr(torch, "stack", stack)
    monkeypatch.setattr(device_tensor, "settle", waits.append)
    dtypes = (torch.int32, torch.uint8, torch.int16, torch.int64, torch.uint8)
    old = [
        torch.randint(0, 9, (n,)).to(t) for n, t in zip((5000, 0, 7, 999, 31), dtypes, strict=True)
    ]
    new = [tensor.clone() for tensor in old]
    new[0][1500:4321:7] += 1
    new[3][998] += 1
    new[4][:] += 1
    found, _ = device_tensor.find_changed(None, list(zip(old, new, strict=True)))
    parts = [part for d in found for part in (d.index, d.before, d.after)]
    told = device_tensor.on_host(parts)
    assert len(waits) == 2
    for number, (before, after) in enumerate(zip(old, new, strict=True)):
        index = torch.nonzero(before != after).reshape(-1)
        expected = (index.int(), before[index], after[index])
        for got, wanted in zip(told[3 * number : 3 * number + 3], expected, strict=True):
            assert got.dtype == wanted.numpy().dtype
            assert got.tolist() == wanted.tolist()
            assert got.flags.aligned


def test_a_large_tensor_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tensor, "_PIECE", 1000)
    monkeypatch.setattr(source_tensors, "_DIGEST_BYTES", 333)
    old = torch.randn(7777).bfloat16()
    new = old.clone()
    new[::99] += 1
    held = DeviceTensor(wrap("w", old))
    held.fill(wrap("w", old), Scratch())
    item = held.item(wrap("w", new), Scratch())
    assert item.index.tolist() == torch.nonzero(old != new).reshape(-1).tolist()
    assert item.new_digest() == tensor_digest(raw(new))


def test_a_tensor_that_has_left_the_device_is_compared_all_the_same() -> None:
    old = torch.randn(500)
    held = DeviceTensor(wrap("w", old))
    held.fill(wrap("w", old), Scratch())
    new = old.numpy().copy()
    new[7] += 1
    item = held.item(wrap("w", new), Scratch())
    assert (item.index.tolist(), item.after.view(np.float32).tolist()) == ([7], [new[7]])


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the host for a device with room."""
    monkeypatch.setattr(snapshot, "roomy", lambda _tensors: (frozenset({None}), True))


@pytest.mark.usefixtures("on_device")
def test_pushes_from_a_device(client: Client, servicer: Any) -> None:
    def refuse(method: str, _request: Any) -> None:
        if method == "CommitPush":
            raise WeightSyncError(Reason.DISK_EXHAUSTED, "the disk is full; free some")

    base = torch.randn(300, 500).bfloat16()
    tensors = {"a": torch.randn(90_000).bfloat16(), "strided": base.T, "empty": torch.zeros(0)}
    client.push(tensors)
    held = client._history.snapshot.current
    assert held is not None
    assert {type(tensor) for tensor in held.tensors.values()} == {DeviceTensor}
    for number in range(4):
        tensors["a"][number::100] += 1
        base[number] *= 1.5
        if number == 2:
            # A commit that fails leaves the copy, and nothing of the delta.
            servicer.before = refuse
            with pytest.raises(ExhaustedError):
                client.push(tensors)
            servicer.before = lambda _method, _request: None
            assert all(t._next is None for t in held.tensors.values())  # type: ignore[attr-defined] # as checked
        result = client.push(tensors)
        assert result.kind is PushKind.DELTA
        upload = next(
            u for u in servicer.uploads.values() if u.commit and u.version == result.version
        )
        for tensor, digest in zip(
            upload.manifest.layout.tensors, upload.manifest.digests, strict=True
        ):
            assert digest == tensor_digest(raw(tensors[tensor.name]))


@pytest.mark.usefixtures("on_device")
def test_a_device_that_is_too_full_to_compare(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.randn(90_000).bfloat16()}
    client.push(tensors)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TorchFinder, "count", full)
    result = client.push(tensors)
    assert (result.kind, result.fallback_reason) == (PushKind.FULL, Fallback.NO_ROOM)


class _Memory:
    """What PyTorch tells of a device."""

    def __init__(self, free: int, reserved: int) -> None:
        self.free, self.reserved = free, reserved

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        return self.free, 1 << 30

    def memory_reserved(self, _: Any) -> int:
        return self.reserved

    def memory_allocated(self, _: Any) -> int:
        return 0


@pytest.mark.parametrize(
    ("free", "reserved", "fits"),
    [(1 << 30, 0, True), (200 << 20, 0, False), (200 << 20, 1 << 30, True)],
)
def test_room_on_a_device(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, fits: bool
) -> None:
    monkeypatch.setattr(torch, "xpu", _Memory(free, reserved))
    there = torch.device("xpu", 0)
    tensor = wrap("w", torch.zeros(1 << 20, dtype=torch.uint8))
    tensors = [tensor, type(tensor)("d", "U8", (1 << 20,), tensor.open, there, tensor.flat)]
    assert snapshot.roomy(tensors) == (frozenset({there} if fits else ()), True)
    # One that tells nothing of its memory is not used.
    monkeypatch.delattr(torch, "xpu")
    assert snapshot.roomy(tensors) == (frozenset(), True)
