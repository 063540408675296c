"""How many shards a delta has: few, where few bytes say what has changed."""

from __future__ import annotations

import pytest

from weightsync_client.snapshot.delta_shards import by_size
from weightsync_client.source.tensors import Scratch, SourceTensor

_MIB = 1 << 20


def _unread(scratch: Scratch) -> None:
    raise NotImplementedError


def _model(count: int, size: int) -> list[SourceTensor]:
    return [SourceTensor(str(n), "U8", (size,), _unread) for n in range(count)]  # type: ignore[arg-type] # sizes alone are asked for


@pytest.mark.parametrize(
    ("ratio", "shards"),
    [(1.0, 16), (0.1, 16), (0.01, 3), (0.0001, 1), (0.0, 1)],
)
def test_a_shard_of_few_changes_takes_what_one_request_is_worth(ratio: float, shards: int) -> None:
    tensors = _model(256, 60 * _MIB)
    groups = list(by_size(tensors, 4, ratio))
    assert len(groups) == shards
    assert sorted(int(one.name) for group in groups for one in group) == list(range(256))


def test_a_small_model_is_one_shard_for_so_many_bytes() -> None:
    assert [len(group) for group in by_size(_model(10, 16 * _MIB), 2)] == [4, 4, 2]
