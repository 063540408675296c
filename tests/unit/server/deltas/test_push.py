"""Deltas from begin to commit: what becomes of them in memory and in the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.deltas import delta_begin, delta_of, every_dtype, stepped
from tests.unit.server.versions.world import World, content, one_stream, world
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.unit.server.versions.world import Shard


async def push_delta(
    here: World, base: Sequence[Shard], new: Sequence[Shard], version: int = 0, **fields: Any
) -> pb.CommitPushResponse:
    shards = delta_of(base, new)
    stream = one_stream(
        shards, version=version, commit=content(new), **delta_begin(base, **fields)
    )
    return (await here.pushes.stream(stream)).commit


def chain(length: int, seed: int = 0) -> list[list[Shard]]:
    versions = [every_dtype(seed)]
    for step in range(length):
        versions.append(stepped(versions[-1], seed + step))
    return versions


@pytest.mark.parametrize("store", ["", "memory://"])
async def test_a_chain_of_deltas_is_what_full_pushes_would_be(tmp_path: Path, store: str) -> None:
    contents = chain(5)
    async with world(tmp_path, store=store) as here:
        await here.push(contents[0], 1)
        for version, (base, new) in enumerate(zip(contents, contents[1:], strict=False), 2):
            answer = await push_delta(here, base, new, version)
            assert (answer.version, answer.content_digest) == (version, content(new))
            assert here.read(version) == [shard.data for shard in new]
        await here.versions.keeper.unmapped()
        assert here.budget.reserved == here.versions.pool.reserved_bytes
