"""Tensors of more than 2^31 elements, from a sparse file: positions do not fit into 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.delta.cases import encode, expected
from weightsync.delta import Item, apply_change, decode_tensor, parse_shard, patch

if TYPE_CHECKING:
    from pathlib import Path

# The first test of a process may compile all kernels.
pytestmark = pytest.mark.timeout(300)

_ELEMENTS = (1 << 31) + 1000


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """Return a tensor of zeros twice; the second may be written, which the file never sees."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(_ELEMENTS)
    assert path.stat().st_blocks * 512 < 1 << 20
    return [np.memmap(path, np.uint8, mode).view(np.ndarray) for mode in ("r", "c")]


def test_positions_beyond_31_bits(pair: Any) -> None:
    base, new = pair
    where = [0, 1, 70_000, (1 << 31) - 2, (1 << 31) - 1, 1 << 31, _ELEMENTS - 1]
    new[where] = np.arange(1, len(where) + 1)
    item = Item("w", "F8_E4M3", (_ELEMENTS,), base, new, base_digest=bytes(16))
    encoded = encode([item])
    assert encoded.stats[0].nnz == len(where)
    # Two bytes for every 65535 elements that are skipped, twice: low and high.
    assert len(encoded.blob) < 2 * (_ELEMENTS >> 16) + 1000
    (change,) = parse_shard(encoded.blob, expected([item])).changes.values()
    done = decode_tensor(change, base)
    assert done.index is not None
    assert done.index.dtype == np.int64
    assert done.index.tolist() == where
    assert done.value.tolist() == list(range(1, len(where) + 1))
    undo = patch(new, done)
    assert undo.value.tolist() == done.value.tolist()
    new[where] = 0
    applied, _ = apply_change(change, new)
    assert new[where].tolist() == applied.value.tolist() == done.value.tolist()
    assert done.within(1 << 31, 1 << 40).value.tolist() == [6, 7]
