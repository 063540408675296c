"""torch's names for the dtypes of safetensors."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["safetensors_dtype", "torch_dtype"]

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


@cache
def torch_dtype(name: str) -> torch.dtype | None:
    """Return torch's dtype for a safetensors dtype; None where this torch has none (F4, F6)."""
    found = getattr(torch, _NAMES.get(name, ""), None)
    return found if isinstance(found, torch.dtype) else None


@cache
def safetensors_dtype(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype; "" where there is none."""
    return next((name for name in _NAMES if torch_dtype(name) is dtype), "")
