"""What is known of the tensors of the push before is told of the same tensors only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightsync_client.errors import InvalidError
from weightsync_client.source.shards import LayoutCache
from weightsync_client.source.source import make_source
from weightsync_client.source.tensors import Scratch


def _tensors(**changed: Any) -> dict[str, Any]:
    tensors = {name: np.full((3, 5), at, np.int16) for at, name in enumerate("abcd")}
    return {**tensors, **changed}


def _bytes(source: Any) -> list[bytes]:
    return [
        b"".join(map(bytes, shard.open(Scratch()).read(0, shard.entry.size)))
        for shard in source.shards
    ]


def test_the_same_tensors_have_the_same_layout_and_their_own_bytes() -> None:
    outlines = LayoutCache()
    first = make_source(_tensors(), 60, outlines)
    again = make_source(_tensors(c=np.full((3, 5), -1, np.int16)), 60, outlines)
    assert again.layout is first.layout
    assert [shard.tensors for shard in again.shards] == [shard.tensors for shard in first.shards]
    old, new = _bytes(first), _bytes(again)
    assert len(old) == len(new) == 2
    assert old[0] == new[0]
    assert old[1] != new[1]
    assert _bytes(make_source(_tensors(c=np.full((3, 5), -1, np.int16)), 60)) == new


@pytest.mark.parametrize(
    "changed",
    [
        {"a": np.zeros((5, 3), np.int16)},
        {"a": np.zeros((3, 5), np.uint16)},
        {"a": np.zeros((3, 6), np.int16)},
        {"e": np.zeros((3, 5), np.int16)},
    ],
    ids=["shape", "dtype", "size", "one more"],
)
def test_other_tensors_have_another(changed: dict[str, Any]) -> None:
    outlines = LayoutCache()
    before = make_source(_tensors(), 60, outlines).layout
    found = make_source(_tensors(**changed), 60, outlines)
    fresh = make_source(_tensors(**changed), 60)
    assert found.layout == fresh.layout != before
    assert _bytes(found) == _bytes(fresh)


def test_other_names_another_order_and_another_cut_are_seen() -> None:
    outlines = LayoutCache()
    before = make_source(_tensors(), 60, outlines).layout
    backwards = dict(reversed(_tensors().items()))
    named = {name.upper(): tensor for name, tensor in _tensors().items()}
    for source, shard_bytes in ((backwards, 60), (named, 60), (_tensors(), 1000)):
        found = make_source(source, shard_bytes, outlines)
        assert found.layout == make_source(source, shard_bytes).layout != before
        assert make_source(_tensors(), 60, outlines).layout == before


def test_what_was_refused_is_refused_again_and_leaves_nothing() -> None:
    outlines = LayoutCache()
    before = make_source(_tensors(), 60, outlines).layout
    for _ in range(2):
        with pytest.raises(InvalidError, match="reserved or not printable"):
            make_source(_tensors(__metadata__=np.zeros(1, np.int16)), 60, outlines)
    assert make_source(_tensors(), 60, outlines).layout is before
