"""Strided copies as rows of bytes, in pieces, cut on the device, and slices as blocks."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightsync.model.tensor_bits import as_ints, wide
from weightsync.vllm.cuda.memory_budget import lay_out
from weightsync.vllm.cuda.staged_write import Comparison
from weightsync.vllm.cuda.uploader import StreamThrottle, Uploader
from weightsync.vllm.plan.int_views import StoppedError
from weightsync.vllm.plan.live_params import view_of
from weightsync.vllm.plan.load_plan import Slice, Strides, chunks, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.vllm.plan.load_plan import PitchedRows

_CPU = torch.device("cpu")


def _numbered(*shape: int, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count).remainder(30011).reshape(shape).to(dtype)


SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: _numbered(6, 8),
    "columns": lambda: _numbered(6, 8)[:, 2:5],
    "rows": lambda: _numbered(6, 8)[1:3],
    "one column": lambda: _numbered(6, 8)[:, 3:4],
    "one row": lambda: _numbered(6, 8)[2:3, 1:7],
    "experts": lambda: _numbered(4, 6, 8)[:, :, :4],
    "middle": lambda: _numbered(4, 6, 8)[:, 2:4, :],
    "scalar": lambda: _numbered(1)[0],
    "turned": lambda: _numbered(6, 8).t(),
    "deep": lambda: _numbered(4, 6, 8)[:, 1:4, 1:5],
    "none": lambda: _numbered(0, 8),
}


class _Runtime:
    """Copies rows as CUDA's runtime is told to, byte by byte."""

    def __init__(self) -> None:
        self.calls = 0

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor, rows: PitchedRows) -> None:
        self.calls += 1
        for row in range(rows.count):
            to = target.data_ptr() + row * rows.target_pitch
            of = source.data_ptr() + row * rows.source_pitch
            ctypes.memmove(to, of, rows.width)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("bounce", [64, 1 << 16])
def test_every_source_arrives(kind: str, gaps: bool, by_rows: bool, bounce: int) -> None:
    source = SOURCES[kind]()
    last = source.shape[-1] if source.dim() else 1
    shape = (*source.shape[:-1], 2 * last) if gaps and source.dim() else source.shape
    frame = torch.full(shape, -1, dtype=source.dtype)
    target = frame[..., :last] if gaps and source.dim() else frame
    untouched = frame.clone()
    runtime: Any = _Runtime() if by_rows else None
    uploader = Uploader(torch.zeros(2 * bounce, dtype=torch.uint8), runtime)
    uploader.send_all(target, source, StreamThrottle(_CPU), bool)
    assert torch.equal(target, source)
    if gaps and source.dim() and source.numel():
        assert torch.equal(frame[..., last:], untouched[..., last:])
    if by_rows and kind in {"columns", "experts"}:
        assert runtime.calls
        assert uploader.sent == source.nbytes


def test_half_of_the_columns_are_half_of_the_bytes() -> None:
    source = _numbered(64, 64)[:, 32:]
    rows = rows_of(torch.empty(64, 32, dtype=torch.int16), source)
    assert rows is not None
    assert (rows.count, rows.width, rows.target_pitch, rows.source_pitch) == (64, 64, 64, 128)


@pytest.mark.parametrize("kind", SOURCES)
def test_pieces_are_small_and_are_all(kind: str) -> None:
    source = SOURCES[kind]()
    target = torch.zeros(source.shape, dtype=source.dtype)
    for to, of in chunks(target, source, 32):
        assert of.nbytes <= 32
        to.copy_(of)
    assert torch.equal(target, source)


@pytest.mark.parametrize("of", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32])
def test_elements_are_converted_on_the_way(of: torch.dtype, to: torch.dtype) -> None:
    source = torch.randn(40, 30).to(of)[:, 3:17]
    target = torch.zeros(40, 14, dtype=to)
    uploader = Uploader(torch.zeros(512, dtype=torch.uint8), None)
    uploader.send(target, source)
    assert torch.equal(target, source.to(to))


def test_it_stops_between_two_pieces() -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    uploader = Uploader(torch.zeros(64, dtype=torch.uint8), None)
    with pytest.raises(StoppedError):
        uploader.send_all(torch.zeros(1000), torch.ones(1000), StreamThrottle(_CPU), stop)
    assert uploader.sent == 64


def _slice(param: str, offset: int, *shape: int) -> Slice:
    stride = tuple(torch.empty(shape).stride())
    return Slice("t", param, Strides(0, shape, stride), Strides(offset, shape, stride), cast=False)


def test_what_fills_a_parameter_together_is_one_block() -> None:
    slices = [
        _slice("qkv", 24, 2, 4),
        _slice("norm", 0, 3),
        _slice("qkv", 0, 4, 4),
        _slice("qkv", 16, 2, 4),
        _slice("padded", 8, 4),
        _slice("padded", 0, 4),
        Slice("t", "turned", Strides(0, (3, 2), (2, 1)), Strides(0, (3, 2), (1, 3)), cast=False),
    ]
    dtypes = dict.fromkeys(("qkv", "norm", "padded", "turned"), torch.bfloat16)
    blocks = lay_out(slices, dtypes)
    told = [(b.param, b.place.offset, b.place.numel, len(b.parts)) for b in blocks.all]
    assert told == [
        ("qkv", 0, 32, 3), ("norm", 0, 3, 1), ("padded", 0, 4, 1), ("padded", 8, 4, 1),
        ("turned", 0, 6, 1),
    ]  # fmt: skip
    assert [(part.index, part.begin) for part in blocks.all[0].parts] == [(2, 0), (3, 16), (0, 24)]
    ends = [block.at + block.nbytes for block in blocks.all]
    assert all(end <= block.at for end, block in zip(ends, blocks.all[1:], strict=False))
    assert blocks.size >= ends[-1]
    live = torch.zeros(64, dtype=torch.bfloat16)
    for piece in blocks.all[0].pieces(10):
        assert piece.nbytes <= 10
        view_of(live, piece.place).add_(1)
    assert live.sum() == 32
    assert [piece.nbytes for piece in blocks.all[4].pieces(4)] == [12]


@pytest.mark.parametrize("size", [1, 7, 64, 100, 4096])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_one_bit_anywhere_is_found(size: int, at: int) -> None:
    mask = torch.ones(64, dtype=torch.bool)
    memory = torch.zeros(at + size, dtype=torch.int16)
    left, right = memory[at:], torch.zeros(size, dtype=torch.int16)
    comparison = Comparison(mask, 3)
    comparison.add("same", left, right)
    comparison.queue()
    assert comparison.wrong() == []
    for place in {0, size // 2, size - 1}:
        other = left.clone()
        other[place] ^= 1 << 14
        comparison = Comparison(mask, 3)
        comparison.add("before", left, right)
        comparison.add("it", other, right)
        comparison.add("after", left, right)
        comparison.queue()
        assert comparison.wrong() == ["it"]


def test_the_widest_integers_that_fit() -> None:
    row = torch.zeros(64, dtype=torch.int16)
    for begin, end, width in ((0, 64, 8), (4, 60, 8), (2, 64, 4), (1, 63, 2), (0, 3, 2)):
        sides = wide(row[begin:end], row[begin:end].clone())
        assert {side.element_size() for side in sides} == {width}
    turned = _numbered(4, 6).t()
    assert wide(turned, turned.clone())[0].shape == (6, 4)
    assert as_ints(turned).shape == (6, 4)
