"""Real fetcher processes and real segments for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.model.digest import tensor_digest
from weightsync.model.layout import build_header
from weightsync.model.manifest import ShardEntry
from weightsync.shm.segments import Segment
from weightsync_server.workers.fetch.fetch_pool import FetcherPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

Spec = tuple[str, str, tuple[int, ...]]
#: A segment, its shard, and the digests of its tensors in the order of their bytes.
Filled = tuple[Segment, ShardEntry, list[bytes]]


@pytest.fixture
def fill() -> Iterator[Callable[[Iterable[Spec]], Filled]]:
    """Return a function that makes a segment with a shard of random bytes."""
    segments = []

    def make(tensors: Iterable[Spec]) -> Filled:
        header, entries = build_header(tensors)
        data = os.urandom(max((entry.end for entry in entries), default=0))
        whole = len(header).to_bytes(8, "little") + header + data
        segment = Segment.create(len(whole))
        segments.append(segment)
        segment.view[: len(whole)] = whole
        digests = [tensor_digest(data[entry.begin : entry.end]) for entry in entries]
        return segment, ShardEntry("test", len(whole), len(header)), digests

    yield make
    for segment in segments:
        segment.close()


@pytest.fixture
async def pool_of() -> AsyncIterator[Callable[..., Any]]:
    """Return a function that starts a pool, which is stopped after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int, **settings: Any) -> FetcherPool:
            pool = FetcherPool(count, **settings)
            stack.push_async_callback(pool.stop)
            await pool.start()
            return pool

        yield start
