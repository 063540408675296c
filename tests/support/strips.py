"""What each of several writers of a push holds: a strip of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsync_client import ShardedTensor

__all__ = ["COLUMNS", "ROWS", "matrix", "part"]

ROWS, COLUMNS = 64, 96


def matrix(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return one that no other seed has."""
    return np.random.default_rng(seed).random((ROWS, COLUMNS), np.float32)


def part(seed: int, writer: int, count: int, *, along: int = 0) -> dict[str, Any]:
    """Return what one of `count` writers holds: a strip of a matrix, and a vector as all do."""
    whole = matrix(seed)
    each = whole.shape[along] // count
    offsets = (writer * each, 0) if along == 0 else (0, writer * each)
    strip = np.take(whole, range(writer * each, (writer + 1) * each), axis=along)
    return {
        "strips": ShardedTensor(whole.shape, "F32", [(offsets, strip)]),
        "vector": whole[0].copy(),
    }
