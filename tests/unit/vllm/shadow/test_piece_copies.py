"""Copies in pieces are the copies one by one, whatever lies between and beside the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import layout_of
from weightsync.vllm.plan.load_plan import Slice, Strides
from weightsync.vllm.plan.staged_tensors import StagedTensors
from weightsync.vllm.shadow.arena import copy_in_pieces

CPU = torch.device("cpu")


def _whole(tensor: torch.Tensor) -> Strides:
    return Strides(0, tuple(tensor.shape), tuple(tensor.stride()))


def _staged(tensors: dict[str, torch.Tensor]) -> StagedTensors:
    return StagedTensors(layout_of(tensors), [memoryview(save(tensors))])


def _tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    experts = {f"e{i}": torch.randn(4, 6, generator=made) for i in range(20)}
    # One byte in front of what has two: what lies behind it lies at odd addresses.
    odd = {f"o{i}": torch.full((1 + 2 * (i % 2),), i, dtype=torch.uint8) for i in range(5)}
    halves = {f"h{i}": torch.randn(3, 8, generator=made).bfloat16() for i in range(8)}
    return {**experts, **odd, **halves, "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)}


@pytest.mark.parametrize("piece_bytes", [1, 90, 200, 1000, 1 << 20])
def test_every_place_gets_what_it_gets_one_by_one(piece_bytes: int) -> None:
    tensors = _tensors()
    staged = _staged(tensors)
    copies: list[tuple[torch.Tensor, Slice]] = []
    for index, (name, tensor) in enumerate(tensors.items()):
        whole = _whole(tensor)
        dtype = torch.float32 if name == "h3" else tensor.dtype
        copies.append(
            (torch.zeros(tensor.shape, dtype=dtype), Slice(name, "p", whole, whole, False))
        )
        if tensor.dim() == 2 and index % 3 == 0 and tensor.numel():
            # The same tensor once more: transposed, and only some of its columns.
            turned = Strides(1, (2, tensor.shape[0]), (1, tensor.shape[1]))
            copies.append(
                (torch.zeros(turned.shape, dtype=dtype), Slice(name, "p", turned, turned, False))
            )
    copy_in_pieces(reversed(copies), staged, CPU, piece_bytes)
    for place, item in copies:
        assert torch.equal(place, staged.slice(item).to(place.dtype)), item


def test_little_of_a_large_piece_is_not_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"e{i}": torch.randn(64, 8) for i in range(10)}
    staged = _staged(tensors)
    sent: list[int] = []
    raw = staged.raw

    def noted(shard: int, begin: int, end: int) -> Any:
        sent.append(end - begin)
        return raw(shard, begin, end)

    monkeypatch.setattr(staged, "raw", noted)
    for rows, pieces in ((64, 1), (32, 1), (16, 0)):
        part = Strides(0, (rows, 8), (8, 1))
        places = [torch.zeros(rows, 8) for _ in tensors]
        copies = [
            (place, Slice(name, "p", part, part, False))
            for place, name in zip(places, tensors, strict=True)
        ]
        sent.clear()
        copy_in_pieces(copies, staged, CPU)
        whole = sum(tensor.nbytes for tensor in tensors.values())
        assert sent.count(whole) == pieces
        for place, tensor in zip(places, tensors.values(), strict=True):
            assert torch.equal(place, tensor[:rows])
