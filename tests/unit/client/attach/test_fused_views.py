"""Experts one by one as the one parameter that transformers keeps them in."""

from __future__ import annotations

import pytest
import torch

from weightsync_client.attach.live_tensors import fused_view

_EXPERTS, _ROWS, _COLUMNS = 3, 2, 4
_NAME = "model.layers.0.mlp.experts.gate_up_proj"


def _live(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.0.mlp.experts.{expert}.{part}.weight": memory[expert, at : at + _ROWS]
        for expert in range(_EXPERTS)
        for part, at in (("gate_proj", 0), ("up_proj", _ROWS))
    }


@pytest.fixture
def memory() -> torch.Tensor:
    whole = torch.arange(1000.0)
    return whole[10 : 10 + _EXPERTS * 2 * _ROWS * _COLUMNS].view(_EXPERTS, 2 * _ROWS, _COLUMNS)


def test_they_are_seen_and_written_where_they_lie(memory: torch.Tensor) -> None:
    live = _live(memory)
    view = fused_view(_NAME, memory.shape, live)
    assert view is not None
    assert view.data_ptr() == memory.data_ptr()
    assert torch.equal(view, memory)
    view[2, 3].fill_(-1)
    assert live["model.layers.0.mlp.experts.2.up_proj.weight"][1].tolist() == [-1] * _COLUMNS
    down = {f"experts.{expert}.down_proj.weight": memory[expert] for expert in range(_EXPERTS)}
    assert torch.equal(fused_view("experts.down_proj", memory.shape, down), memory)  # type: ignore[arg-type]  # never None here


def test_what_does_not_lie_so_is_none(memory: torch.Tensor) -> None:
    live = _live(memory)
    last = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert fused_view(_NAME, memory.shape, live | {last: live[last].clone()}) is None
    assert fused_view(_NAME, memory.shape, live | {last: live[last].bfloat16()}) is None
    others = {**live, last: live["model.layers.0.mlp.experts.1.up_proj.weight"]}
    assert fused_view(_NAME, memory.shape, others) is None
    del live[last]
    assert fused_view(_NAME, memory.shape, live) is None
    assert fused_view(_NAME, (2, *memory.shape[1:]), live) is not None
    assert fused_view(_NAME, (2, 2 * _ROWS * _COLUMNS), live) is None
    assert fused_view("model.norm.weight", memory.shape, live) is None


def test_up_before_gate_is_none(memory: torch.Tensor) -> None:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = {
        name.replace(part, names[part]): view
        for name, view in _live(memory).items()
        for part in names
        if f".{part}." in name
    }
    assert fused_view(_NAME, memory.shape, swapped) is None
