"""The stored delta of a version back out, byte for byte, and what is said where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.deltas import delta_of
from tests.unit.server.deltas.pushing import push_delta, sparse_history
from tests.unit.server.world import MODEL, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.usecases.pull_calls import pull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.unit.server.world import World


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


def asked(version: int, **fields: int) -> pb.PullWeightsRequest:
    return pb.PullWeightsRequest(model=MODEL, version=version, delta=True, **fields)


async def test_a_delta_comes_as_it_was_pushed(here: World) -> None:
    base, new = sparse_history(1)
    await here.push(base, 1)
    await push_delta(here, base, new, 2)
    before = here.budget.reserved
    first, *rest = [message async for message in pull(here.model, asked(2, chunk_bytes=1000))]
    assert first.version.base_version == 1
    expected = delta_of(base, new)
    for shard in expected:
        parts = [m.layout for m in rest if m.HasField("layout") and m.layout.shard == shard.index]
        assert [part.size_bytes for part in parts] == [len(shard.data)]
        chunks = [m.chunk for m in rest if m.HasField("chunk") and m.chunk.shard == shard.index]
        assert b"".join(chunk.data for chunk in chunks) == shard.data
        digests = [m.digests.digests for m in rest if m.HasField("digests")]
        assert b"".join(shard.digests) in digests
    assert len({m.layout.shard for m in rest if m.HasField("layout")}) == len(expected)
    assert here.budget.reserved <= before
    # A part of it, as one that was cut off asks.
    half = [m async for m in pull(here.model, asked(2, shard=1, offset=100))]
    data = b"".join(m.chunk.data for m in half if m.HasField("chunk"))
    assert data == expected[1].data[100:]


async def test_a_version_in_full_has_none(here: World) -> None:
    (base,) = sparse_history(0)
    await here.push(base, 1)
    with pytest.raises(WeightSyncError, match="pull it in full") as caught:
        _ = [message async for message in pull(here.model, asked(1))]
    assert caught.value.reason is Reason.BASE_MISMATCH
