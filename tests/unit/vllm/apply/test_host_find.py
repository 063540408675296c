"""What differs between two versions, as elements of live parameters: all of it, nothing else."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.apply import host_params
from weightsync.vllm.apply.host_params import Differences, find_differences
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.apply.writes import differ, put
from weightsync.vllm.plan import int_views
from weightsync.vllm.plan.int_views import StoppedError, memory_of
from weightsync.vllm.plan.live_params import view_of
from weightsync.vllm.plan.load_plan import Slice, Strides

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def _whole(tensor: torch.Tensor) -> Strides:
    return Strides(0, tuple(tensor.shape), tensor.stride())


def _find(
    old: torch.Tensor,
    new: torch.Tensor,
    live: torch.Tensor,
    source: Strides | None = None,
    target: Strides | None = None,
) -> Differences | None:
    item = Slice("t", "p", source or _whole(old), target or _whole(live), old.dtype != live.dtype)
    parts = [view_of(tensor, item.source) for tensor in (old, new)]
    place = view_of(live, item.target)
    return find_differences([item], [parts[0]], [parts[1]], [place], SliceThreads(1), bool)


def _patched(live: torch.Tensor, found: Differences | None) -> int:
    """Write what was found; return how many elements that were."""
    assert found is not None
    assert not found.dense
    for change in found.changes.values():
        assert differ(memory_of(live), change.positions, change.values)
        put(memory_of(live), change.positions, change.values)
        assert not differ(memory_of(live), change.positions, change.values)
    return sum(len(change.positions) for change in found.changes.values())


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(as_ints(left.contiguous()), as_ints(right.contiguous()))


def _flipped(tensor: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    """Return a copy in which one bit of about `share` of the elements is another."""
    made = tensor.clone()
    chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share
    as_ints(made)[chosen] ^= 1
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 1, 7), (300, 70)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: Any) -> None:
    size = torch.empty(shape, dtype=dtype)
    raw = torch.randint(0, 2, (*shape, size.element_size()), dtype=torch.uint8)
    old = raw.reshape(-1).view(dtype).reshape(shape).clone()
    new = _flipped(old, 0.02)
    count = int((as_ints(old) != as_ints(new)).sum())
    live = old.clone()
    assert _patched(live, _find(old, new, live)) == count
    assert _same(live, new)


def test_nan_payloads_and_the_sign_of_zero_count() -> None:
    patterns = [0x7F800001, 0x7FC00000, 0xFFC00000, 0x00000000, 0x80000000, 0x7F800000]
    raw = torch.frombuffer(bytearray(struct.pack("<6I", *patterns)), dtype=torch.float32)
    old = raw.repeat(64)
    new = old.clone()
    new[0], new[3], new[7] = old[1], old[4], old[2]
    live = old.clone()
    assert _patched(live, _find(old, new, live)) == 3
    assert _same(live, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_shards_and_fused_rows_of_blocks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_params, "_BLOCK", 100)
    old = torch.randn(40, 30).to(dtype)
    new = _flipped(old, 0.05)
    live = torch.zeros(90, 15, dtype=dtype)
    # The second rank's columns lie in the middle of a fused parameter.
    source, target = Strides(15, (40, 15), (30, 1)), Strides(20 * 15, (40, 15), (15, 1))
    view_of(live, target).copy_(view_of(old, source))
    before = live.clone()
    _patched(live, _find(old, new, live, source, target))
    assert _same(view_of(live, target), view_of(new, source).contiguous())
    assert _same(live[:20], before[:20])
    assert _same(live[60:], before[60:])


def test_a_place_with_gaps_and_a_transposed_parameter() -> None:
    old = torch.randn(16, 24)
    new = _flipped(old, 0.1)
    live = torch.zeros(16, 50)
    target = Strides(3, (16, 24), (50, 2))
    view_of(live, target).copy_(old)
    _patched(live, _find(old, new, live, target=target))
    assert _same(view_of(live, target), new)
    turned = old.t().contiguous().t()
    _patched(turned, _find(old, new, turned))
    assert _same(turned, new)


def test_a_copy_that_rounds_loses_most_changes() -> None:
    old = torch.randn(4096)
    new = old * (1 + 1e-5)
    live = old.bfloat16()
    count = _patched(live, _find(old, new, live))
    assert 0 < count < 100
    assert _same(live, new.bfloat16())


def test_a_copy_that_widens() -> None:
    old = torch.randn(64, 64).bfloat16()
    new = _flipped(old, 0.03)
    live = old.float()
    _patched(live, _find(old, new, live))
    assert _same(live, new.float())


def _slices(*tensors: torch.Tensor) -> list[Slice]:
    return [Slice(str(i), str(i), _whole(t), _whole(t), cast=False) for i, t in enumerate(tensors)]


def test_what_changed_much_is_copied_and_what_is_known_to_be_the_same_not_read() -> None:
    old = [torch.randn(999), torch.randn(3000), torch.randn(5000)]
    new = [_flipped(old[0], 0.5), _flipped(old[1], 0.01), old[2] + 1]
    known: list[torch.Tensor | None] = [old[0], old[1], None]
    found = find_differences(_slices(*old), known, new, old, SliceThreads(2), bool)
    assert found is not None
    assert (found.dense, set(found.changes)) == ({0}, {1})


def test_a_third_is_little_and_more_is_much() -> None:
    old = [torch.zeros(300), torch.zeros(900)]
    new = [tensor.clone() for tensor in old]
    new[0][::3] = 1
    found = find_differences(_slices(*old), list(old), new, old, SliceThreads(1), bool)
    assert found is not None
    assert (found.dense, len(found.changes[0].positions)) == (set(), 100)
    new[0][1] = 1
    found = find_differences(_slices(*old), list(old), new, old, SliceThreads(1), bool)
    assert found is not None
    assert (found.dense, found.changes) == ({0}, {})


def test_there_is_no_patch_when_it_moves_half_as_much_as_a_copy() -> None:
    old = [torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.int16)]
    # Four bytes of position and two of value each; half of all is 2000 bytes.
    for count, patched in ((333, True), (334, False)):
        new = [tensor.clone() for tensor in old]
        for tensor, many in zip(new, (count // 2, count - count // 2), strict=True):
            tensor[:many] = 1
        found = find_differences(_slices(*old), list(old), new, old, SliceThreads(1), bool)
        assert (found is not None) is patched


def test_a_slice_that_begins_with_another_content_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_params, "_BLOCK", 10)
    asked: list[int] = []
    old = [torch.zeros(1000), torch.zeros(9000)]
    new = [torch.ones(1000), torch.zeros(9000)]

    def stop() -> bool:
        asked.append(1)
        return False

    found = find_differences(_slices(*old), [old[0], None], new, old, SliceThreads(1), stop)
    assert found is not None
    assert (found.dense, len(asked)) == ({0}, 1)


def test_it_stops_between_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_params, "_BLOCK", 10)
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    old = [torch.zeros(1000)]
    with pytest.raises(StoppedError):
        find_differences(_slices(*old), list(old), old, old, SliceThreads(1), stop)
    assert len(asked) == 3


def test_positions_beyond_31_bits_are_wide() -> None:
    far = Strides(2**31 - 4, (5,), (1,))
    at = torch.arange(5).numpy()
    assert host_params._positions(at, Strides(2**31 - 6, (5,), (1,))).dtype == "int32"
    assert host_params._positions(at, far).dtype == "int64"
    assert host_params._positions(at, far)[-1] == 2**31


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digests_do_not_depend_on_pieces(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(64, 33)
    views = [tensor, tensor.t(), tensor[:, 3:20], tensor[:1, :5], tensor[0, 0], tensor[:0]]
    whole = [int_views.tensor_digest_of(view.to(dtype).contiguous()) for view in views]
    monkeypatch.setattr(int_views, "_PIECE_BYTES", 64)
    monkeypatch.setattr(int_views, "_ALONE", 7)
    assert [int_views.tensor_digest_of(view, dtype) for view in views] == whole
    with pytest.raises(StoppedError):
        int_views.tensor_digest_of(tensor, dtype, lambda: True)
