"""What a server marks as come, and what a reader makes of it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from tests.unit.vllm.conftest import layout_of, toy_tensors
from weightsync.gpu import ipc
from weightsync.model.manifest import Layout, ShardEntry, TensorEntry
from weightsync.shm.incoming_version import HANDLE_BYTES, Arrival, ArrivalReader, ArrivalWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

_IDS = ("aa", "bb", "cc")
_LAYOUT = Layout(tuple(ShardEntry(name, 24, 16) for name in _IDS), ())


@pytest.fixture
def writer() -> Iterator[ArrivalWriter]:
    made = ArrivalWriter(_LAYOUT, _IDS)
    yield made
    made.segment.close()


def _shards(arrivals: Iterator[Arrival]) -> list[int]:
    found = list(arrivals)
    assert not any(arrival.on_gpu for arrival in found)
    return [arrival.shard for arrival in found]


def test_a_handle_is_as_long_as_those_of_the_driver() -> None:
    assert ctypes.sizeof(ipc._Handle) == HANDLE_BYTES


def test_where_a_shard_lies_is_told_once_and_then_that_it_came() -> None:
    entries = [("a", 0, 8), ("none", 8, 8), ("b", 8, 24)]
    tensors = [TensorEntry(name, "U8", (end - at,), 1, at, end) for name, at, end in entries]
    tensors.append(TensorEntry("c", "U8", (8,), 0, 0, 8))
    shards = ShardEntry("0", 24, 8), ShardEntry("1", 40, 8)
    writer = ArrivalWriter(Layout(shards, tuple(tensors)), ["aa", "bb"])
    # An empty tensor has no place.
    here = [(b"\1" * 64, 7), (b"\2" * 64, 1 << 40)]
    there = [(b"\3" * 64, 0)]
    steps = iter([lambda: writer.mark_ipc(1, here), lambda: writer.mark_ipc(0, there),
                  lambda: writer.mark(1), lambda: writer.mark_ipc(1, there),
                  writer.end])  # fmt: skip

    def wait(_: float) -> bool:
        next(steps)()
        return False

    reader = ArrivalReader(writer.segment.view)
    told = [
        (shard, lies, reader.ipc_addresses(shard) if lies else None)
        for shard, lies in reader.arrivals(wait, 60)
    ]
    assert told == [(1, True, here), (0, True, there), (1, False, None)]
    writer.segment.close()


@pytest.mark.parametrize("over", ["", "ended", "all came"])
def test_when_all_has_come_nothing_lies_anywhere(writer: ArrivalWriter, over: str) -> None:
    for shard in range(3):
        writer.mark_ipc(shard, [])
    arrivals = ArrivalReader(writer.segment.view).arrivals(lambda _: True, 60)
    assert next(arrivals) == (0, True)
    came = range(3) if over == "all came" else [1]
    for shard in came:
        writer.mark(shard)
    if over == "ended":
        writer.end()
    lie = [] if over else [(1, True), (2, True)]
    assert list(arrivals) == [*lie, *((shard, False) for shard in came)]


def test_what_lies_on_a_gpu_is_told_before_what_came(writer: ArrivalWriter) -> None:
    writer.mark(0)
    for shard in (1, 2):
        writer.mark_ipc(shard, [])
    writer.mark(1)
    arrivals = ArrivalReader(writer.segment.view).arrivals(lambda _: True, 60)
    assert list(arrivals) == [(1, True), (2, True), (0, False), (1, False)]


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

    assert _shards(ArrivalReader(writer.segment.view).arrivals(wait, 60)) == [2, 0, 1]


def test_what_came_before_the_end_is_told_after_it(writer: ArrivalWriter) -> None:
    writer.mark(1)
    writer.mark(0)
    writer.end()
    assert _shards(ArrivalReader(writer.segment.view).arrivals(lambda _: False, 60)) == [0, 1]


def test_it_ends_when_the_reader_is_called_off_or_nothing_comes(writer: ArrivalWriter) -> None:
    writer.mark(1)
    reader = ArrivalReader(writer.segment.view)
    assert _shards(reader.arrivals(lambda _: True, 60)) == [1]

    def never(seconds: float) -> bool:
        raise AssertionError(seconds)

    assert _shards(reader.arrivals(never, 0.0)) == [1]


def test_other_memory_is_refused(writer: ArrivalWriter) -> None:
    view = writer.segment.view
    with pytest.raises(ValueError, match="not an arriving version"):
        ArrivalReader(view[8:])
    with pytest.raises(ValueError, match="not an arriving version"):
        ArrivalReader(memoryview(bytes(view[:64])))
    other = ArrivalWriter(_LAYOUT, _IDS[:2])
    with pytest.raises(ValueError, match="2 segments for 3 shards"):
        ArrivalReader(other.segment.view)
    other.segment.close()
