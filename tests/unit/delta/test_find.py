"""Single elements of tensors in memory: all kernels do the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.guard_pages import guarded, guarded_copy
from weightsync.delta.coding import Broken
from weightsync.delta.kernels import chosen


def _pair(size: int, width: int, density: float) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(size)
    base = rng.integers(0, 256, size * width, np.uint8).view(f"<i{width}")
    new = base.copy()
    where = np.flatnonzero(rng.random(size) < density)
    # In any byte, so that none is overlooked.
    new.view(np.uint8).reshape(size, width)[where, rng.integers(0, width, len(where))] ^= 1
    return base, new, where


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_found_and_put_back(width: int, size: int, density: float) -> None:
    base, new, where = _pair(size, width, density)
    for at_end in (True, False):
        held, wanted = (guarded_copy(each, at_end=at_end) for each in (base, new))
        index, value = chosen().find(held, wanted)
        assert index.dtype == np.int32
        assert index.tolist() == where.tolist()
        assert value.tobytes() == new[where].tobytes()
        for dtype in ("<i4", "<i8"):
            target = guarded_copy(base, at_end=at_end)
            places = guarded_copy(index.astype(dtype), at_end=at_end)
            values = guarded_copy(value, at_end=at_end)
            assert chosen().holds(target, places, values) is (len(where) == 0)
            chosen().put(target, places, values)
            assert target.tobytes() == new.tobytes()
            assert chosen().holds(target, places, values)
            if len(where):
                target.view(np.uint8)[where[-1] * width + width - 1] ^= 0x80
                assert not chosen().holds(target, places, values)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["<i4", "<i8"])
@pytest.mark.parametrize("outside", [-1, 100, 2**31 - 1])
def test_what_lies_outside_is_told_and_not_touched(width: int, dtype: str, outside: int) -> None:
    for at_end in (True, False):
        target = guarded(100, f"<i{width}", at_end=at_end)
        index = np.array([3, outside, 99], dtype)
        value = np.array([5, 6, 7], f"<i{width}")
        with pytest.raises(Broken):
            chosen().put(target, index, value)
        assert np.flatnonzero(target).tolist() == [3, 99]
        assert chosen().holds(target, index[::2].copy(), value[::2].copy())
        assert not chosen().holds(target, index, value)
