"""A delta shard of whole tensors is what every reader of deltas takes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weightsync.delta import DenseDelta, DenseTensor, apply_change, parse_shard
from weightsync.model.digest import tensor_digest

BASE, LAYOUT = "ab" * 16, "cd" * 16
KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "b.weight": ("BF16", (3, 40)),
    "a": ("F32", (7,)),
    "b.größe": ("U8", (129,)),
    "b.number": ("I64", ()),
    "half": ("F4", (6, 4)),
}
SIZES = {"b.weight": 240, "a": 28, "b.größe": 129, "b.number": 8, "half": 12}


def tensors(source: bytes) -> list[DenseTensor]:
    """Return where the tensors lie in a source, with gaps between."""
    found, at = [], 5
    for name, (dtype, shape) in KINDS.items():
        end = at + SIZES[name]
        digest = tensor_digest(source[at:end])
        found.append(DenseTensor(name, dtype, shape, at, end, digest))
        at = end + 3
    return found


@pytest.mark.parametrize("count", range(len(KINDS) + 1))
def test_it_makes_the_tensors(count: int) -> None:
    source = random.Random(count).randbytes(600)
    given = tensors(source)[:count]
    made = DenseDelta(3, BASE, LAYOUT, given)
    blob = bytearray(made.size)
    made.write(memoryview(blob), memoryview(source))
    delta = parse_shard(blob, KINDS)
    assert (delta.index, delta.base_content_digest, delta.layout_digest) == (3, BASE, LAYOUT)
    assert set(delta.changes) == {tensor.name for tensor in given}
    assert int.from_bytes(blob[:8], "little") == made.header_size
    for tensor in given:
        after = np.zeros(tensor.end - tensor.begin, np.uint8)
        apply_change(delta.changes[tensor.name], after)
        assert after.tobytes() == source[tensor.begin : tensor.end]


def test_work_that_is_called_off_ends_at_the_next_piece() -> None:
    source = bytes(600)
    made = DenseDelta(0, BASE, LAYOUT, tensors(source))

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        made.write(memoryview(bytearray(made.size)), memoryview(source), stop)
