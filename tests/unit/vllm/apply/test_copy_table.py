"""Copies by table are those of the plan, in shares that several threads can take."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.apply.writes import CopyGeometry, CopyTable, write_each
from weightsync.vllm.plan.load_plan import LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAN = LoadPlan("", {}, (), {})


def _table(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> CopyTable:
    return CopyTable(CopyGeometry(PLAN, places, sources), places, sources)


def _views(memory: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return views that do not overlap: rows, columns, blocks, single elements, none at all."""
    rows = memory.view(dtype)[: 64 * 48].view(64, 48)
    return [
        rows[0],
        rows[1:5],
        rows[5:20, 7:31],
        rows[5:20, 31],
        rows[20:24].view(2, 2, 48)[:, 1, 3:40],
        rows[24:40].view(4, 4, 48)[:, 1:3, 3:40],
        rows[40:44].t(),
        rows[44, 5],
        rows[45:45],
        rows[46:64],
    ]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("to", "of"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_everything_is_copied_and_nothing_else(
    threads: int, to: torch.dtype, of: torch.dtype
) -> None:
    size = 64 * 48
    source = torch.randn(size).to(of).view(torch.uint8)
    live = torch.zeros(size, dtype=to).view(torch.uint8)
    wanted = live.clone()
    for place, values in zip(_views(wanted, to), _views(source, of), strict=True):
        place.copy_(values)
    table = _table(_views(live, to), _views(source, of))
    assert len(table.sizes) > 4
    write_each(SliceThreads(threads), table.copy, table.sizes)
    assert torch.equal(live, wanted)
    assert live.any()


def test_long_copies_are_shared_and_many_small_ones_are_one() -> None:
    source = torch.arange(1 << 21, dtype=torch.int64)
    live = torch.zeros_like(source)
    half = len(source) // 2
    small = [slice(at, at + 64) for at in range(half, len(source), 64)]
    random.Random(1).shuffle(small)
    parts = [slice(0, half), *small]
    table = _table([live[part] for part in parts], [source[part] for part in parts])
    assert sum(table.sizes) == source.nbytes
    # 8 MiB of each.
    assert max(table.sizes) <= 2 << 20
    assert len(table.sizes) <= 24
    for index in range(len(table.sizes)):
        table.copy(index)
    assert torch.equal(live, source)


def test_nothing_to_copy() -> None:
    assert _table([], []).sizes == []
    assert _table([torch.zeros(0, 4)], [torch.zeros(0, 4)]).sizes == []
