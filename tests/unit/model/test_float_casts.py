"""Casts of floats by NumPy and by PyTorch give the same bytes, and what cannot be cast is found."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from weightsync.model import float_casts
from weightsync.model.dtypes import DTYPE_BITS, torch_dtype
from weightsync.model.float_casts import FLOATS, NON_FINITE, CastRangeError, cast_elements, casts
from weightsync.model.tensor_bits import INTS
from weightsync_client.source import torch_casts

_PAIRS = list(itertools.permutations(FLOATS, 2))


def _torch(name: str) -> torch.dtype:
    found = torch_dtype(name)
    assert found is not None
    return found


def _values(dtype: str) -> np.ndarray[Any, Any]:
    """Return bytes of elements: all 16-bit patterns, of wider ones many, and those at edges."""
    if DTYPE_BITS[dtype] == 16:
        return np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    rng = np.random.default_rng(1)
    small = rng.standard_normal(20_000)
    edges = [
        0.0, -0.0, 1e-45, 6e-8, 5.9e-8, 65504.0, 65519.9, -65519.9, 3.38e38, float("inf"),
        float("-inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, 1 + 2**-24, 1e-310,
    ]  # fmt: skip
    kind = np.float32 if dtype == "F32" else np.float64
    with np.errstate(over="ignore", under="ignore"):
        return np.concatenate([small, small * 1e-7, edges]).astype(kind).view(np.uint8)


def _fitting(data: np.ndarray[Any, Any], given: str, wanted: str) -> np.ndarray[Any, Any]:
    """Leave out what would become infinite."""
    before = torch.from_numpy(data.copy()).view(_torch(given))
    after = before.to(_torch(wanted))
    kept = before[~(torch.isinf(after) & torch.isfinite(before))]
    return kept.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize(("given", "wanted"), _PAIRS)
def test_both_libraries_make_what_pytorch_s_cast_makes(given: str, wanted: str) -> None:
    data = _fitting(_values(given), given, wanted)
    made = cast_elements(data, given, wanted)
    by_torch = torch_casts.cast_elements(torch.from_numpy(data.copy()), given, wanted)
    assert np.array_equal(made, by_torch.numpy())
    before = torch.from_numpy(data.copy()).view(_torch(given))
    expected = before.to(_torch(wanted))
    found = torch.from_numpy(made.copy()).view(_torch(wanted))
    numbers = ~torch.isnan(expected)
    assert torch.equal(torch.isnan(found), ~numbers)
    width = INTS[DTYPE_BITS[wanted] // 8]
    assert torch.equal(found[numbers].view(width), expected[numbers].view(width))


@pytest.mark.parametrize(("given", "wanted"), _PAIRS)
def test_a_cast_in_parts_is_the_cast_of_all(given: str, wanted: str) -> None:
    data = _fitting(_values(given), given, wanted)
    step = 7 * DTYPE_BITS[given] // 8
    parts = [
        torch_casts.cast_elements(torch.from_numpy(data[at : at + step].copy()), given, wanted)
        for at in range(0, min(len(data), 300 * step), step)
    ]
    made = cast_elements(data, given, wanted)
    joined = torch.cat(parts).numpy()
    assert np.array_equal(joined, made[: len(joined)])


@pytest.mark.parametrize(
    ("given", "wanted", "value"),
    [
        ("F32", "BF16", 3.4e38),  # Finite in BF16 but for its rounding.
        ("F32", "F16", 65520.0),
        ("BF16", "F16", -1e6),
        ("F64", "F32", 1e39),
        ("F64", "BF16", -1e300),
        ("F64", "F16", 65520.0),
    ],
)
def test_what_would_become_infinite_is_named(given: str, wanted: str, value: float) -> None:
    values = torch.tensor([1.0, float("inf"), float("nan"), value], dtype=_torch(given))
    flat = values.view(torch.uint8)
    for make in (
        lambda: cast_elements(flat.numpy(), given, wanted),
        lambda: torch_casts.cast_elements(flat, given, wanted),
    ):
        with pytest.raises(CastRangeError) as caught:
            make()
        assert caught.value.index == 3
        assert caught.value.value == float(values[3])


def test_what_is_finite_just_below_stays_so() -> None:
    values = torch.tensor([3.389e38, -65519.0], dtype=torch.float32)
    made = cast_elements(values[:1].view(torch.uint8).numpy(), "F32", "BF16")
    assert torch.from_numpy(made).view(torch.bfloat16)[0] == values[0].bfloat16()
    made = cast_elements(values[1:].view(torch.uint8).numpy(), "F32", "F16")
    assert torch.from_numpy(made).view(torch.float16)[0] == -65504.0


@pytest.mark.parametrize("dtype", NON_FINITE)
def test_each_pattern_that_is_no_number_is_found_and_no_other(dtype: str) -> None:
    if dtype == "C64":
        values = torch.tensor([1 + 2j, complex(3, float("nan"))])
        assert float_casts.find(values.view(torch.float32).view(torch.uint8).numpy(), "C64") == 3
        return
    data = _values(dtype) if DTYPE_BITS[dtype] > 8 else np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(data.copy()).view(_torch(dtype)).double()
    finite = torch.isfinite(values)
    width = DTYPE_BITS[dtype] // 8
    for at in itertools.chain(range(3), (~finite).nonzero().reshape(-1).tolist()[:40]):
        one = data[at * width : (at + 1) * width]
        expected = -1 if finite[at] else 0
        assert float_casts.find(one, dtype) == expected
        assert torch_casts.find(torch.from_numpy(one.copy()), dtype) == expected
    kept = np.concatenate(
        [data[at * width : (at + 1) * width] for at in finite.nonzero().reshape(-1).tolist()]
    )
    assert float_casts.find(kept, dtype) == torch_casts.find(torch.from_numpy(kept), dtype) == -1


def test_other_dtypes_are_not_cast() -> None:
    assert casts("F32", "BF16")
    assert not casts("F32", "F32")
    assert not any(casts("F32", other) for other in DTYPE_BITS if other not in FLOATS)
    assert not any(casts(other, "BF16") for other in DTYPE_BITS if other not in FLOATS)
