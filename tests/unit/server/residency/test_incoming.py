"""What engines look at while a version comes in: one for all, which knows who may map it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.world import World, make_shard, world
from weightsync_server.residency.incoming import IncomingReader
from weightsync_server.residency.slot import slot_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


async def _arriving(here: World) -> IncomingReader:
    """Return the reader of a version as if it still came into the memory in which it lies."""
    await here.push([make_shard(0, [("a", "U8", (1000,), bytes(1000))])], 1)
    record = here.model.table.get(1)
    assert record.manifest is not None
    segments = list(slot_of(record).segments.values())
    return IncomingReader(record, record.manifest.layout, segments, here.model.segments)


async def test_engines_that_ask_at_once_look_at_one(here: World) -> None:
    arriving = await _arriving(here)
    segments = here.model.segments
    segments.engines.update(("a", "b", "c"))
    before = segments.budget.reserved
    names = await asyncio.gather(*(arriving.offer() for _ in range(3)))
    assert len(set(names)) == 1
    one = segments.budget.reserved - before
    assert await arriving.offer() == names[0]
    assert segments.budget.reserved - before == one
    arriving.end()
    await segments.unmapped()
    assert segments.budget.reserved == before
    assert await arriving.offer() == ""


async def test_an_engine_that_comes_later_is_known_to_map_it(here: World) -> None:
    arriving = await _arriving(here)
    segments = here.model.segments
    segments.engines.add("a")
    name = await arriving.offer()
    segments.engines.add("b")
    await arriving.offer()
    assert name in segments.exposed_to("b")
    assert segments.exposed_to("b") == segments.exposed_to("a")
    segments.release(segments.exposed_to("a"), "a")
    assert len(segments.exposed_to("b")) > 1
    arriving.end()
