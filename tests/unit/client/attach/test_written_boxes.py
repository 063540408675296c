"""Live parameters beside what was written into them."""

from __future__ import annotations

import pytest
import torch

from weightsync_client.attach import joint_update
from weightsync_client.attach.joint_update import WrittenBox, copy_boxes, find_unequal

_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]


def _wrong(live: torch.Tensor, source: torch.Tensor) -> list[str]:
    return find_unequal([WrittenBox("a", live, source), WrittenBox("b", live, live)])


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (16,), (5, 3), (8, 8)], ids=str)
def test_one_bit_is_found_wherever_it_is(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randn(shape).to(dtype)
    live = source.clone()
    assert _wrong(live, source) == []
    if live.numel():
        live.view(-1).view(torch.uint8)[-1] ^= 1
        assert _wrong(live, source) == ["a"]


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_places_with_gaps_and_odd_beginnings(cut: int) -> None:
    whole = torch.randn(8, 12, dtype=torch.bfloat16)
    source = torch.randn(8, 12 - cut).bfloat16()
    live = whole[:, cut:]
    live.copy_(source)
    assert _wrong(live, source) == []
    live[7, -1] += 1
    assert _wrong(live, source) == ["a"]
    flat = whole.view(-1)[cut : cut + 32]
    assert _wrong(flat, flat.clone()) == []


def test_what_is_cast_is_compared_as_it_was_cast() -> None:
    source = torch.tensor([1.0, -0.0, float("nan"), 3.14159], requires_grad=True)
    live = source.detach().bfloat16()
    assert _wrong(live, source) == []
    live[1] = 0.0
    assert _wrong(live, source) == ["a"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_nan_may_be_cast_to_another_one(dtype: torch.dtype) -> None:
    for shape in ((48, 64), (64, 48)):
        source = torch.randn(64, 48).view(shape)
        source[3, 5] = float("nan")
        live = torch.zeros(48, 64, dtype=dtype)
        given = source if shape == (48, 64) else source.t()
        copy_boxes([WrittenBox("a", live, given)])
        assert _wrong(live, given) == []
        live[0, 0] = float("nan")
        assert _wrong(live, given) == ["a"]


def test_large_ones_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_update, "_PIECE_BYTES", 64)
    source = torch.randn(33, 5)
    for row in (0, 16, 32):
        live = source.clone()
        assert _wrong(live, source) == []
        live[row, 4] += 1
        assert _wrong(live, source) == ["a"]


def test_nothing_was_written() -> None:
    assert find_unequal([]) == []
