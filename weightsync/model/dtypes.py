"""The dtypes of safetensors: how wide they are, what PyTorch calls them, how a delta names them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


#: Bits per element of every dtype, and PyTorch's name; "": it has none whose elements are as many.
#: Their order is that of a delta's code points: what is in use keeps its number for ever.
_TABLE = (
    ("BOOL", 8, "bool"),
    ("U8", 8, "uint8"),
    ("I8", 8, "int8"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("F4", 4, ""),
    ("F6_E2M3", 6, ""),
    ("F6_E3M2", 6, ""),
    ("I16", 16, "int16"),
    ("U16", 16, "uint16"),
    ("F16", 16, "float16"),
    ("BF16", 16, "bfloat16"),
    ("I32", 32, "int32"),
    ("U32", 32, "uint32"),
    ("F32", 32, "float32"),
    ("C64", 64, "complex64"),
    ("F64", 64, "float64"),
    ("I64", 64, "int64"),
    ("U64", 64, "uint64"),
)

#: Every dtype, by its code point.
DTYPES: tuple[str, ...] = tuple(name for name, _, _ in _TABLE)
#: Bits per element of every dtype.
DTYPE_BITS: Mapping[str, int] = {name: bits for name, bits, _ in _TABLE}
_TORCH = {name: torch_name for name, _, torch_name in _TABLE if torch_name}


# Only who has PyTorch's tensors needs it here: servers do without.
@cache
def torch_dtype(name: str) -> torch.dtype | None:
    """Return PyTorch's dtype for a dtype; None where this PyTorch has none."""
    import torch

    found = getattr(torch, _TORCH.get(name, ""), None)
    return found if isinstance(found, torch.dtype) else None


@cache
def safetensors_dtype(dtype: torch.dtype) -> str:
    """Return the dtype that is one of PyTorch's; "" where there is none."""
    return next((name for name in _TORCH if torch_dtype(name) is dtype), "")
