from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.server.versions.world import World, simple
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.versions import Scrubber

if TYPE_CHECKING:
    from collections.abc import Callable

FAST = 1 << 40


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "header": lambda data: flipped(data, 20),
    "first tensor": lambda data: flipped(data, data.index(b"}}") + 300),
    "last byte": lambda data: flipped(data, -1 % len(data)),
    "shorter": lambda data: data[:-1],
}


def shard_file(here: World, version: int, shard: int = 1) -> Path:
    source = here.versions.store.shard_source("m", version, shard)
    assert source is not None
    return Path(source)


@pytest.mark.parametrize("kind", DAMAGE)
async def test_damage_is_found_told_on_use_and_never_healed_in_silence(
    here: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    await here.push(simple(1), 1)
    record = here.versions.get(1)
    scrubber = Scrubber(here.versions, FAST)
    await scrubber.scrub(record)
    assert record.damaged == ""
    path = shard_file(here, 1)
    data = path.read_bytes()
    path.write_bytes(DAMAGE[kind](data))
    await scrubber.scrub(record)
    assert record.damaged
    assert "version 1 is damaged in the store" in caplog.text
    for version in (2, 3):
        await here.push(simple(version), version)
    with pytest.raises(WeightSyncError, match="restore the store") as caught:
        await here.versions.stage(1, 5)
    assert caught.value.reason is Reason.DATA_CORRUPT
    path.write_bytes(data)
    await scrubber.scrub(record)
    assert record.damaged == ""
    with await here.versions.stage(1, 5):
        assert here.read(1) == [shard.data for shard in simple(1)]


async def test_it_goes_round_and_passes_over_what_is_deleted(here: World) -> None:
    await here.push(simple(1), 1)
    await here.push(simple(2), 2)
    path = shard_file(here, 2)
    path.write_bytes(flipped(path.read_bytes(), -1 % path.stat().st_size))
    running = asyncio.create_task(Scrubber(here.versions, FAST).run())
    await here.versions.delete(1)
    end = time.monotonic() + 10
    while not here.versions.get(2).damaged:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
