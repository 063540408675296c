"""What a server marks as come, and what a reader makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.vllm.conftest import layout_of, toy_tensors
from weightsync.arriving import ArrivalReader, ArrivalWriter
from weightsync.manifest import Layout, ShardEntry

if TYPE_CHECKING:
    from collections.abc import Iterator

_IDS = ("aa", "bb", "cc")
_LAYOUT = Layout(tuple(ShardEntry(name, 24, 16) for name in _IDS), ())


@pytest.fixture
def writer() -> Iterator[ArrivalWriter]:
    made = ArrivalWriter(_LAYOUT, _IDS)
    yield made
    made.segment.close()


def test_the_reader_finds_layout_and_segments() -> None:
    layout = layout_of(toy_tensors(1))
    writer = ArrivalWriter(layout, ["only"])
    try:
        reader = ArrivalReader(writer.segment.view)
        assert (reader.layout.digest, reader.segments) == (layout.digest, ("only",))
    finally:
        writer.segment.close()


def test_each_shard_is_told_once_as_it_comes(writer: ArrivalWriter) -> None:
    coming = iter([2, 0, 1])

    def wait(seconds: float) -> bool:
        assert seconds > 0
        shard = next(coming, None)
        if shard is None:
            writer.end()
        else:
            writer.mark(shard)
        return False

    assert list(ArrivalReader(writer.segment.view).arrivals(wait, 60)) == [2, 0, 1]


def test_what_came_before_the_end_is_told_after_it(writer: ArrivalWriter) -> None:
    writer.mark(1)
    writer.mark(0)
    writer.end()
    assert list(ArrivalReader(writer.segment.view).arrivals(lambda _: False, 60)) == [0, 1]


def test_it_ends_when_the_reader_is_called_off_or_nothing_comes(writer: ArrivalWriter) -> None:
    writer.mark(1)
    reader = ArrivalReader(writer.segment.view)
    assert list(reader.arrivals(lambda _: True, 60)) == [1]

    def never(seconds: float) -> bool:
        raise AssertionError(seconds)

    assert list(reader.arrivals(never, 0.0)) == [1]


def test_other_memory_is_refused(writer: ArrivalWriter) -> None:
    view = writer.segment.view
    with pytest.raises(ValueError, match="not a version that comes in"):
        ArrivalReader(view[8:])
    with pytest.raises(ValueError, match="not a version that comes in"):
        ArrivalReader(memoryview(bytes(view[:64])))
    other = ArrivalWriter(_LAYOUT, _IDS[:2])
    with pytest.raises(ValueError, match="2 segments for 3 shards"):
        ArrivalReader(other.segment.view)
    other.segment.close()
