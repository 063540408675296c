"""A box's bytes go where NumPy would put them, in whatever pieces they come, and come back so."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from weightsync.model import tensor_slices
from weightsync.model.tensor_slices import Box, span_of


def _random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    sides = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
    return Box(tuple(low for low, _ in sides), tuple(high - low for low, high in sides))


@pytest.mark.parametrize("seed", range(60))
def test_bytes_go_where_they_belong_and_come_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(tensor_slices, "_PIECE", rng.choice([1, 7, 64, 1 << 20]))
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
    width, begin = rng.choice([1, 2, 4]), rng.randint(0, 9)
    box = _random_box(rng, shape)
    memory = bytearray(begin + math.prod(shape) * width)
    span = span_of(box, shape, width * 8, begin)
    data = rng.randbytes(box.elements * width)
    assert span.size == len(data)

    at = 0
    while at < len(data):
        step = rng.randint(1, len(data))
        span.put(memoryview(memory), at, data[at : at + step])
        at += step

    expected = np.zeros((*shape, width), np.uint8)
    expected[box.slices] = np.frombuffer(data, np.uint8).reshape(*box.sizes, width)
    assert bytes(memory[begin:]) == expected.tobytes()
    assert not any(memory[:begin])
    assert b"".join(span.pieces(memoryview(memory))) == data


def test_rows_of_a_matrix_are_one_run() -> None:
    span = span_of(Box((2, 0), (3, 8)), (10, 8), 16, 100)
    assert span == (100 + 2 * 8 * 2, 3 * 8 * 2, (), ())


def test_columns_of_a_matrix_are_a_run_for_each_row() -> None:
    span = span_of(Box((0, 4), (10, 4)), (10, 8), 16, 0)
    assert span == (8, 8, (10,), (16,))


def test_half_a_byte_is_no_place_to_begin() -> None:
    with pytest.raises(ValueError, match=r"\[0:2, 1:3\] begins or ends within a byte"):
        span_of(Box((0, 1), (2, 2)), (2, 4), 4, 0)
    assert span_of(Box((0, 2), (2, 2)), (2, 4), 4, 0).run == 1
