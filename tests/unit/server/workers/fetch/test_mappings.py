"""The mappings that a fetcher keeps."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import descriptors
from weightsync.shm.segments import Segment
from weightsync_server.workers.runtime.mappings import Maps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _mapped(pid: int | str) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:weightsync")


@pytest.fixture
def segments() -> Iterator[list[Segment]]:
    made = [Segment.create(4096) for _ in range(4)]
    yield made
    for segment in made:
        segment.close()


def _use(maps: Maps, segment: Segment, *, writable: bool = False) -> Any:
    fd = os.dup(segment.fd) if writable else segment.read_only_fd()
    return maps.use(segment.id, fd, segment.capacity, writable=writable)


def test_a_mapping_is_kept_until_forgotten(segments: list[Segment]) -> None:
    maps, before = Maps(), _mapped("self")
    for _ in range(3):
        with _use(maps, segments[0]) as view:
            assert view.readonly
    assert _mapped("self") == before + 1
    maps.forget(segments[0].id)
    maps.forget("unknown")
    assert _mapped("self") == before


def test_a_mapping_in_use_is_unmapped_by_its_last_user(segments: list[Segment]) -> None:
    maps, before = Maps(), _mapped("self")
    segments[0].view[0] = 7
    with _use(maps, segments[0]) as first:
        with _use(maps, segments[0]) as second:
            maps.forget(segments[0].id)
            assert second[0] == 7
        assert first[0] == 7
        assert _mapped("self") == before + 1
    assert _mapped("self") == before


def test_only_the_latest_mappings_are_kept(segments: list[Segment]) -> None:
    maps, before = Maps(limit=2), _mapped("self")
    for segment in segments:
        with _use(maps, segment):
            pass
    assert len(maps) == 2
    assert _mapped("self") == before + 2


def test_a_read_only_mapping_is_replaced_where_writing_is_needed(segments: list[Segment]) -> None:
    maps, before = Maps(), _mapped("self")
    with _use(maps, segments[0]):
        pass
    with _use(maps, segments[0], writable=True) as view:
        view[5] = 9
    with _use(maps, segments[0]) as view:
        assert view[5] == 9
    assert segments[0].view[5] == 9
    assert _mapped("self") == before + 1


def test_no_descriptor_is_left_open(segments: list[Segment]) -> None:
    maps = Maps()
    before = descriptors()
    for _ in range(5):
        with _use(maps, segments[0]):
            pass
    with pytest.raises(OSError, match="Permission denied"):
        maps.use("x", segments[0].read_only_fd(), 4096, writable=True).__enter__()
    assert descriptors() == before + 1  # mmap keeps one per mapping


async def test_the_pool_has_every_fetcher_forget(
    fill: Callable[..., Any], pool_of: Callable[..., Any]
) -> None:
    pool = await pool_of(2)
    segment, shard, _ = fill([("w", "U8", (8 << 20,))])
    await asyncio.gather(*(pool.digest(segment, shard) for _ in range(20)))
    assert sum(map(_mapped, pool.pids)) >= 1
    await pool.forget(segment.id)
    assert sum(map(_mapped, pool.pids)) == 0
    await pool.forget("unknown")
