"""Engines of several servers that use one bucket: equal checkpoints are one version."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tests.unit.server.world import content, make_shard, real_fetchers, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.record import local_number

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.unit.server.conftest import Offered
    from tests.unit.server.world import Shard, World


async def adopted(here: World, offered: Offered, shards: list[Shard]) -> int:
    """Adopt as the engine's supervisor does: what passes is tried again."""
    while True:
        try:
            return (await here.model.adoption.adopt(offered(shards), 0)).version
        except WeightSyncError as error:
            if error.reason is not Reason.PUSH_ABORTED:
                raise
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def worlds(bucket: str, folder: Path, names: str) -> AsyncIterator[list[World]]:
    """Open servers that share a bucket; before any of them has a version."""
    async with contextlib.AsyncExitStack() as stack:
        fetchers = await stack.enter_async_context(real_fetchers())
        yield [
            await stack.enter_async_context(
                world(folder / name, store=bucket, identity=name, fetchers=fetchers)
            )
            for name in names
        ]


def numbers(here: World) -> list[int]:
    return sorted(record.version for record in here.model.table.list())


def in_one_file(shards: list[Shard]) -> list[Shard]:
    """Return the same tensors in another encoding."""
    tensors = [
        (e.name, e.dtype, e.shape, s.data[8 + s.header_size :][e.begin : e.end])
        for s in shards
        for e in s.entries
    ]
    return [make_shard(0, tensors)]


async def test_equal_content_joins_and_other_content_stays_local(
    bucket: str, tmp_path: Path, offered: Offered
) -> None:
    same, other = simple(1), simple(2)
    async with worlds(bucket, tmp_path, "abc") as (one, two, three):
        assert await adopted(one, offered, same) == 1
        assert await adopted(two, offered, in_one_file(same)) == 1
        local = await adopted(three, offered, other)
        assert local == local_number(content(other))
        table = three.model.table
        assert (table.newest, table.highest, table.next_version()) == (1, 1, 2)
        assert table.newest_applicable().version == 1
        # The number goes to what is pushed.
        assert await one.push(simple(3)) == 2


async def test_of_those_that_come_at_once_one_creates_the_number(
    bucket: str, tmp_path: Path, offered: Offered
) -> None:
    same, other = simple(1), simple(2)
    async with worlds(bucket, tmp_path, "abc") as (one, two, three):
        found = await asyncio.gather(
            adopted(one, offered, same),
            adopted(two, offered, in_one_file(same)),
            adopted(three, offered, other),
        )
        assert found[0] == found[1]
        assert (found[0], found[2]) in [
            (1, local_number(content(other))),
            (local_number(content(same)), 1),
        ]
        store = one.model.store
        assert {r.version for r in await store.committed_elsewhere("m")} == set(found)


async def test_who_has_the_epoch_numbers_what_it_starts_on(
    bucket: str, tmp_path: Path, offered: Offered
) -> None:
    async with worlds(bucket, tmp_path, "ab") as (one, two):
        await one.model.epochs.acquire("trainer")
        assert await one.push(simple(1), epoch=1) == 1
        assert await adopted(two, offered, simple(2)) == local_number(content(simple(2)))
        assert await adopted(one, offered, simple(3)) == 2
        assert await adopted(two, offered, simple(3)) == 2
        assert numbers(one)[:2] == [1, 2]
