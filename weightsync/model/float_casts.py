"""Casts among float16, bfloat16, float32 and float64, in bytes, and values that are not finite.

A cast gives the same bytes however its elements are parted: every NaN becomes the same one, and of
a float64 what float32 makes of it is rounded again, as PyTorch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BitPattern(NamedTuple):
    """Words of `width` bytes that are no finite number: their bits under `mask` are `value`."""

    width: int
    mask: int
    value: int


#: Of every dtype that has values which are not finite; a complex one is two words.
NON_FINITE: Mapping[str, BitPattern] = {
    "F8_E4M3": BitPattern(1, 0x7F, 0x7F),
    "F8_E5M2": BitPattern(1, 0x7C, 0x7C),
    "F8_E8M0": BitPattern(1, 0xFF, 0xFF),
    "F8_E4M3FNUZ": BitPattern(1, 0xFF, 0x80),
    "F8_E5M2FNUZ": BitPattern(1, 0xFF, 0x80),
    "F16": BitPattern(2, 0x7C00, 0x7C00),
    "BF16": BitPattern(2, 0x7F80, 0x7F80),
    "F32": BitPattern(4, 0x7F800000, 0x7F800000),
    "C64": BitPattern(4, 0x7F800000, 0x7F800000),
    "F64": BitPattern(8, 0x7FF0000000000000, 0x7FF0000000000000),
}

#: What is cast, and the NaN that every NaN becomes.
FLOATS: Mapping[str, int] = {
    "F16": 0x7E00,
    "BF16": 0x7FC0,
    "F32": 0x7FC00000,
    "F64": 0x7FF8000000000000,
}
_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


class CastRangeError(ValueError):
    """A finite value, of the element `index`, that the other dtype has no finite one for."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"element {index} is {value:g}")
        self.index = index
        self.value = value


def casts(given: str, wanted: str) -> bool:
    """Whether one dtype becomes the other by a plain cast of floats."""
    return given != wanted and given in FLOATS and wanted in FLOATS


def find(data: NDArray[np.uint8], dtype: str) -> int:
    """Return the position of the first word of `dtype` that is no finite number; -1: all are."""
    found = _non_finite(data, dtype)
    return int(found.argmax()) if found.any() else -1


def cast_elements(data: NDArray[np.uint8], given: str, wanted: str) -> NDArray[np.uint8]:
    """Return whole elements of dtype `given` as `wanted`, for which see `casts`.

    Raises CastRangeError when a finite one would not stay finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        made = _cast(data, given, wanted)
    found = _non_finite(made, wanted)
    if found.any():
        before = _non_finite(data, given)
        lost = found & ~before
        if lost.any():
            index = int(lost.argmax())
            raise CastRangeError(index, float(_wide(data, given)[index]))
        words = made.view(f"<u{NON_FINITE[wanted].width}")
        words[np.isnan(_wide(made, wanted))] = FLOATS[wanted]
    return made


def _non_finite(data: NDArray[np.uint8], dtype: str) -> NDArray[np.bool_]:
    width, mask, value = NON_FINITE[dtype]
    words = data.view(f"<u{width}")
    found: NDArray[np.bool_] = (words & words.dtype.type(mask)) == words.dtype.type(value)
    return found


def _wide(data: NDArray[np.uint8], dtype: str) -> NDArray[np.floating]:
    if dtype == "BF16":
        return (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return data.view(_NUMPY[dtype])


def _cast(data: NDArray[np.uint8], given: str, wanted: str) -> NDArray[np.uint8]:
    values = _wide(data, given)
    if wanted in ("BF16", "F16"):
        values = values.astype("<f4", copy=False)
    if wanted == "BF16":
        bits = values.view("<u4")
        # To the nearest, of two that are as near to the even one; a NaN may become anything.
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        nan = np.isnan(values)
        if nan.any():
            rounded[nan] = np.uint32(FLOATS["F32"])
        upper: NDArray[np.uint8] = (rounded >> np.uint32(16)).astype("<u2").view(np.uint8)
        return upper
    made: NDArray[np.uint8] = values.astype(_NUMPY[wanted]).view(np.uint8)
    return made
