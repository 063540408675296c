"""Our kernels' search finds what PyTorch's does; tests/gpu has the same on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.host_kernels import HostKernels
from weightsync.gpu import spans
from weightsync.vllm.cuda import search as search_
from weightsync.vllm.cuda.blocks import Block
from weightsync.vllm.cuda.scatter import Scatter
from weightsync.vllm.cuda.search import KernelSearch, Pairs, TorchSearch, pairs_of, searches
from weightsync.vllm.cuda.staged_write import Staged
from weightsync.vllm.cuda.uploader import Pace
from weightsync.vllm.plan.int_views import StoppedError, words_of
from weightsync.vllm.plan.load_plan import Strides

if TYPE_CHECKING:
    from weightsync.vllm.cuda.search import Search

_DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]
#: Elements of the pieces: around the ends of 16 bytes and of a span.
_SIZES = (1, 15, 16, 17, 63, 64, 65, 1000, 4096)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have spans of 64 bytes, of which three are looked at with a launch."""
    monkeypatch.setattr(spans, "SPAN", 64)
    monkeypatch.setattr(search_, "_AT_ONCE", 3)


class _Targets:
    """One parameter."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    def param(self, name: str) -> torch.Tensor:
        assert name == "row"
        return self._row


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
    words = memory.view(words_of(live.view(dtype)).dtype)
    words[torch.rand(len(words)) < 1 / 9] ^= 1
    row: Any = _Targets(live.view(dtype))
    mask = torch.zeros(8192, dtype=torch.bool)
    return Staged(row, blocks, memory, mask, kernels), words_of(live.view(dtype))


def _scatter(row: torch.Tensor, count: int) -> Scatter:
    positions = torch.full((count,), -1, dtype=torch.int64)
    values = torch.zeros(count, dtype=row.dtype)
    return Scatter(row, positions, values, torch.zeros(0), torch.zeros(0))


def _found(search: Search, row: torch.Tensor, chosen: list[bool]) -> Any:
    pace = Pace(torch.device("cpu"))
    counts = search.count(pace, bool)
    some = sum(count for count, wanted in zip(counts, chosen, strict=True) if wanted)
    scatter = _scatter(row, some + 7)
    end = search.take(chosen, scatter, 5, pace, bool)
    assert end == some + 5
    return counts, scatter.positions.tolist(), scatter.values.tolist()


def _ours(staged: Staged) -> Pairs:
    """Return what our kernels can look at."""
    (ours,) = (some for some in pairs_of(staged, staged.blocks) if some.table is not None)
    return ours


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("every", [1, 2])
def test_both_find_the_same(dtype: torch.dtype, every: int) -> None:
    kernels = HostKernels()
    staged, row = _staged(dtype, kernels)
    pairs = _ours(staged)
    chosen = [index % every == 0 for index in range(len(pairs.pieces))]
    ours = KernelSearch(pairs, kernels)
    found = _found(ours, row, chosen)
    assert found == _found(TorchSearch(staged, pairs.pieces), row, chosen)
    # Once more, with what is there already.
    assert found == _found(ours, row, chosen)
    assert found == _found(KernelSearch(pairs, kernels), row, chosen)
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
    found = searches(staged, pairs_of(staged, staged.blocks))
    assert [type(one) for one in found] == [KernelSearch, TorchSearch]
    # It begins beside a multiple of 16 bytes.
    assert [piece.place.numel for piece in found[1].pieces] == [1000]
    plain: Any = SimpleNamespace(**{**vars(staged), "kernels": None})
    (other,) = searches(plain, pairs_of(plain, staged.blocks))
    assert type(other) is TorchSearch
    assert list(other.pieces) == list(staged.blocks)


def _searching(kind: Any) -> tuple[Search, torch.Tensor]:
    """Return what looks through pieces, and the live parameter."""
    kernels = HostKernels()
    staged, row = _staged(torch.float32, kernels)
    pairs = _ours(staged)
    ours = kind is KernelSearch
    return KernelSearch(pairs, kernels) if ours else TorchSearch(staged, pairs.pieces), row


@pytest.mark.parametrize("kind", [KernelSearch, TorchSearch])
def test_what_is_written_meanwhile_is_noticed(kind: Any) -> None:
    search, row = _searching(kind)
    pace = Pace(torch.device("cpu"))
    count = sum(search.count(pace, bool))
    row[2000] ^= 1
    with pytest.raises(RuntimeError, match="were written while they were compared"):
        search.take([True] * len(search.pieces), _scatter(row, count), 0, pace, bool)


@pytest.mark.parametrize("kind", [KernelSearch, TorchSearch])
def test_it_stops(kind: Any) -> None:
    search, row = _searching(kind)
    pace = Pace(torch.device("cpu"))
    with pytest.raises(StoppedError):
        search.count(pace, lambda: True)
    count = sum(search.count(pace, bool))
    with pytest.raises(StoppedError):
        search.take([True] * len(search.pieces), _scatter(row, count), 0, pace, lambda: True)
