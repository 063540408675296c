"""Elements of any width, and positions of either: what several compiled loops begin with."""

from __future__ import annotations

from typing import Any

from weightsync.delta.kernels.intrinsics import (
    differ8,
    differ16,
    differ32,
    differ64,
    load8,
    load16,
    load32,
    load64,
    store8,
    store16,
    store32,
    store64,
)
from weightsync.jit.compiling import inner

__all__ = ["load", "load_place", "mark", "store"]


@inner
def mark(base: Any, new: Any, words: Any, width: Any, masks: Any) -> Any:
    """Write a mask for each 64 elements. A loop of nothing else reads as fast as memory gives."""
    if width == 1:
        for at in range(words):
            store64(masks + 8 * at, differ8(base + 64 * at, new + 64 * at))
    elif width == 2:
        for at in range(words):
            store64(masks + 8 * at, differ16(base + 128 * at, new + 128 * at))
    elif width == 4:
        for at in range(words):
            store64(masks + 8 * at, differ32(base + 256 * at, new + 256 * at))
    else:
        for at in range(words):
            store64(masks + 8 * at, differ64(base + 512 * at, new + 512 * at))


@inner
def load(address: Any, width: Any) -> Any:
    """Return the element at an address."""
    if width == 2:
        return load16(address)
    if width == 4:
        return load32(address)
    return load8(address) if width == 1 else load64(address)


@inner
def store(address: Any, width: Any, value: Any) -> Any:
    """Write the element at an address."""
    if width == 2:
        store16(address, value)
    elif width == 4:
        store32(address, value)
    elif width == 1:
        store8(address, value)
    else:
        store64(address, value)


@inner
def load_place(index: Any, at: Any, size: Any) -> Any:
    """Return the position that stands at `at`, in `size` bytes."""
    # A negative position of four bytes reads as one beyond 2^31.
    return load32(index + 4 * at) if size == 4 else load64(index + 8 * at)
