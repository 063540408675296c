"""Our kernels find what PyTorch's do; tests/gpu has the same on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.host_kernels import HostKernels
from weightsync.gpu import device_find, device_kernels
from weightsync.gpu.device_find import KernelFinder, TorchFinder
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.cuda import device_patch
from weightsync.vllm.cuda.device_patch import PatchFinder, PieceGroup, fill, groups_of
from weightsync.vllm.cuda.memory_budget import Block
from weightsync.vllm.cuda.scatter import Scatter
from weightsync.vllm.cuda.staged_write import Staged
from weightsync.vllm.cuda.uploader import StreamThrottle
from weightsync.vllm.plan.int_views import StoppedError
from weightsync.vllm.plan.load_plan import Strides

if TYPE_CHECKING:
    from weightsync.gpu.device_find import Finder

_DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]
#: Elements of the pieces: around the ends of 16 bytes and of a span.
_SIZES = (1, 15, 16, 17, 63, 64, 65, 1000, 4096)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have spans of 64 bytes, of which three are looked at with a launch."""
    monkeypatch.setattr(device_kernels, "SPAN", 64)
    monkeypatch.setattr(device_find, "_AT_ONCE", 3)


class _Targets:
    """One parameter."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    def param(self, name: str) -> torch.Tensor:
        assert name == "row"
        return self._row

    def views(self) -> list[torch.Tensor]:
        return []


def _staged(dtype: torch.dtype, kernels: HostKernels | None) -> tuple[Staged, torch.Tensor]:
    """Return a version of which about one element in nine differs, and the live row."""
    width = dtype.itemsize
    blocks, at = [], 0
    for size in _SIZES:
        # Every piece but one begins at a multiple of 16 bytes.
        begin = at + (width if size == 1000 else 0)
        place = Strides(begin // width, (size,), (1,))
        blocks.append(Block("row", dtype, place, begin))
        at += -(-(size + 1) * width // 16) * 16
    torch.manual_seed(width)
    live = torch.randint(256, (at,), dtype=torch.uint8)
    memory = live.clone()
    words = memory.view(as_ints(live.view(dtype)).dtype)
    words[torch.rand(len(words)) < 1 / 9] ^= 1
    row: Any = _Targets(live.view(dtype))
    mask = torch.zeros(8192, dtype=torch.bool)
    return Staged(row, blocks, memory, mask, kernels), as_ints(live.view(dtype))


def _groups(staged: Staged, kernels: HostKernels) -> dict[Any, PieceGroup]:
    """Return by its class what looks at the pieces that our kernels can look at."""
    ours = next(g for g in groups_of(staged, staged.blocks) if isinstance(g.finder, KernelFinder))
    plain = Staged(staged.targets, ours.pieces, staged.memory, staged.mask)
    (torchs,) = groups_of(plain, plain.blocks)
    return {KernelFinder: ours, TorchFinder: torchs}


def _found(finder: Finder, row: torch.Tensor, chosen: list[bool]) -> Any:
    step = StreamThrottle(torch.device("cpu")).step
    counts = finder.count(step)
    some = sum(count for count, wanted in zip(counts, chosen, strict=True) if wanted)
    positions = torch.full((some + 7,), -1, dtype=torch.int64)
    values = torch.zeros(some + 7, dtype=row.dtype)
    own = slice(5, some + 5)
    changed = finder.take(chosen, row.data_ptr(), positions[own], values[own], step)
    assert not changed.item()
    return counts, positions.tolist(), values.tolist()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("every", [1, 2])
def test_both_find_the_same(dtype: torch.dtype, every: int) -> None:
    kernels = HostKernels()
    staged, row = _staged(dtype, kernels)
    groups = _groups(staged, kernels)
    ours, other = groups[KernelFinder].finder, groups[TorchFinder].finder
    chosen = [index % every == 0 for index in range(len(groups[KernelFinder].pieces))]
    found = _found(ours, row, chosen)
    assert found == _found(other, row, chosen)
    # Once more, with what is there already.
    assert found == _found(ours, row, chosen)
    assert _found(ours, row, [False] * len(chosen))[1:] == ([-1] * 7, [0] * 7)
    counts, positions, _ = found
    assert sum(counts) > 400
    assert positions[:5] == positions[-2:] + [-1] * 3
    assert sorted(positions[5:-2]) == positions[5:-2]
    bits = 8 * dtype.itemsize
    assert set(kernels.ran) == {f"count_changes_{bits}", f"take_changes_{bits}"}
    assert kernels.ran.count(f"count_changes_{bits}") > 3


def test_pieces_go_to_who_can_look_at_them() -> None:
    kernels = HostKernels()
    staged, _ = _staged(torch.bfloat16, kernels)
    found = groups_of(staged, staged.blocks)
    assert [type(group.finder) for group in found] == [KernelFinder, TorchFinder]
    # It begins beside a multiple of 16 bytes.
    assert [piece.place.numel for piece in found[1].pieces] == [1000]
    plain = Staged(staged.targets, staged.blocks, staged.memory, staged.mask)
    (other,) = groups_of(plain, staged.blocks)
    assert type(other.finder) is TorchFinder
    assert list(other.pieces) == list(staged.blocks)


def _finding(kind: Any) -> tuple[PieceGroup, torch.Tensor]:
    """Return what looks at pieces, and the live parameter."""
    kernels = HostKernels()
    staged, row = _staged(torch.float32, kernels)
    return _groups(staged, kernels)[kind], row


def _take(group: PieceGroup, row: torch.Tensor, count: int, step: Any) -> torch.Tensor:
    positions, values = torch.zeros(count, dtype=torch.int64), row.new_zeros(count)
    chosen = [True] * len(group.pieces)
    return group.finder.take(chosen, row.data_ptr(), positions, values, step)


@pytest.mark.parametrize("kind", [KernelFinder, TorchFinder])
def test_what_is_written_meanwhile_is_noticed(kind: Any) -> None:
    group, row = _finding(kind)
    step = StreamThrottle(torch.device("cpu")).step
    count = sum(group.finder.count(step))
    row[2000] ^= 1
    assert _take(group, row, count, step).item() != 0


@pytest.mark.parametrize("own", [True, False])
def test_a_patch_of_parameters_that_are_written_meanwhile_is_refused(
    monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    monkeypatch.setattr(device_patch, "_WORTH", 1)
    staged, row = _staged(torch.float32, HostKernels() if own else None)
    pace = StreamThrottle(torch.device("cpu"))
    found = PatchFinder().find(staged, pace, bool)
    assert found is not None
    places = torch.zeros(found.counts[4], dtype=torch.int64)
    values = row.new_zeros(found.counts[4])
    row[2000] ^= 1
    with pytest.raises(RuntimeError, match="were written while they were compared"):
        fill(found, {4: Scatter(row, places, values, values, values)}, pace, bool)


@pytest.mark.parametrize("kind", [KernelFinder, TorchFinder])
def test_it_stops(kind: Any) -> None:
    group, row = _finding(kind)
    pace = StreamThrottle(torch.device("cpu"))
    with pytest.raises(StoppedError):
        group.finder.count(pace.steps(lambda: True))
    count = sum(group.finder.count(pace.step))
    with pytest.raises(StoppedError):
        _take(group, row, count, pace.steps(lambda: True))
