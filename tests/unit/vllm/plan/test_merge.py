"""Merged copies are the same copies, as few as they can be made with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from weightsync.vllm.plan.live_params import view_of
from weightsync.vllm.plan.load_plan import LoadPlan, Slice, Strides, merge_neighbours

if TYPE_CHECKING:
    from collections.abc import Iterable

EXPERTS, ROWS, COLUMNS = 4, 6, 8


def _part(view: torch.Tensor) -> Strides:
    return Strides(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def _slice(name: str, param: str, source: torch.Tensor, target: torch.Tensor) -> Slice:
    target.copy_(source)
    return Slice(name, param, _part(source), _part(target), cast=False)


def _plan(slices: Iterable[Slice], tensors: dict[str, torch.Tensor]) -> LoadPlan:
    shapes = {name: ("I64", tuple(tensor.shape)) for name, tensor in tensors.items()}
    return LoadPlan("", shapes, tuple(slices), {})


def _written(plan: LoadPlan, tensors: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    made = torch.full_like(like, -1)
    for item in plan.slices:
        assert item.source.shape == item.target.shape
        view_of(made, item.target).copy_(view_of(tensors[item.tensor], item.source))
    return made


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_all_experts_of_a_fused_tensor_are_one_copy(ranks: int, rank: int) -> None:
    source = torch.arange(EXPERTS * 2 * ROWS * COLUMNS).reshape(EXPERTS, 2 * ROWS, COLUMNS)
    size = ROWS // ranks
    live = torch.full((EXPERTS, 2 * size, COLUMNS), -1)
    slices = [
        _slice(
            "gate_up",
            "w13",
            source[expert, half * ROWS + rank * size :][:size],
            live[expert, half * size :][:size],
        )
        for half in range(2)
        for expert in range(EXPERTS)
    ]
    plan = _plan(slices, {"gate_up": source})
    merged = merge_neighbours(plan)
    assert len(merged.slices) == 1
    assert torch.equal(_written(merged, {"gate_up": source}, live), live)
    assert merged.whole == (frozenset({0}) if ranks == 1 else frozenset())
    assert merged.written == plan.written


def test_columns_of_all_experts_are_one_copy_of_rows() -> None:
    source = torch.arange(EXPERTS * ROWS * COLUMNS).reshape(EXPERTS, ROWS, COLUMNS)
    live = torch.full((EXPERTS, ROWS, COLUMNS // 2), -1)
    slices = [
        _slice("down", "w2", source[expert, :, COLUMNS // 2 :], live[expert])
        for expert in range(EXPERTS)
    ]
    merged = merge_neighbours(_plan(slices, {"down": source}))
    (item,) = merged.slices
    assert (item.source.shape, item.source.stride) == ((EXPERTS * ROWS, 4), (COLUMNS, 1))
    assert torch.equal(_written(merged, {"down": source}, live), live)


def test_what_is_no_neighbour_stays_apart() -> None:
    tensors = {name: torch.arange(1, 65) * scale for name, scale in (("a", 1), ("b", 100))}
    live = torch.full((64,), -1)
    a, b = tensors["a"], tensors["b"]
    slices = [
        # Of two tensors; backwards; with a hole between; in unequal steps; of another length.
        _slice("a", "p", a[0:4], live[0:4]),
        _slice("b", "p", b[4:8], live[4:8]),
        _slice("a", "p", a[40:44], live[8:12]),
        _slice("a", "p", a[36:40], live[12:16]),
        _slice("a", "p", a[44:48], live[20:24]),
        _slice("a", "p", a[48:52], live[24:28]),
        _slice("a", "p", a[56:60], live[28:32]),
        _slice("a", "p", a[60:64], live[40:44]),
        _slice("a", "p", a[62:64], live[44:46]),
    ]
    plan = _plan(slices, tensors)
    merged = merge_neighbours(plan)
    # Two of them follow each other on both sides.
    assert len(merged.slices) == len(slices) - 1
    assert torch.equal(_written(merged, tensors, live), live)
    alone = _plan(slices[:4], tensors)
    assert merge_neighbours(alone) is alone


def test_parameters_are_not_mixed() -> None:
    source = torch.arange(8)
    live = torch.full((8,), -1)
    slices = [
        _slice("a", "p", source[:4], live[:4]),
        _slice("a", "q", source[4:], live[4:]),
    ]
    assert len(merge_neighbours(_plan(slices, {"a": source})).slices) == 2
