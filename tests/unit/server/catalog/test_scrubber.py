from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.engine.plant import until
from tests.unit.server.world import World, simple
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog import scrubber
from weightsync_server.catalog.scrubber import Scrubber

if TYPE_CHECKING:
    from collections.abc import Callable

FAST = 1 << 40


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "_FIRST_S", 0.0)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "header": lambda data: flipped(data, 20),
    "first tensor": lambda data: flipped(data, data.index(b"}}") + 300),
    "last byte": lambda data: flipped(data, -1 % len(data)),
    "shorter": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
}


def _scrubber(here: World) -> Scrubber:
    model = here.model
    return Scrubber(model.table, model.store, model.materializer.lock, FAST)


def shard_file(here: World, version: int, shard: int = 1) -> Path:
    source = here.model.store.shard_path("m", version, shard)
    assert source is not None
    return Path(source)


@pytest.mark.parametrize("kind", DAMAGE)
async def test_damage_is_found_told_on_use_and_never_healed_in_silence(
    here: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    await here.push(simple(1), 1)
    record = here.model.table.get(1)
    looking = _scrubber(here)
    await looking.scrub(record)
    assert record.damaged == ""
    path = shard_file(here, 1)
    data = path.read_bytes()
    path.write_bytes(DAMAGE[kind](data))
    await looking.scrub(record)
    assert record.damaged
    assert "version 1 is damaged in the store" in caplog.text
    for version in (2, 3):
        await here.push(simple(version), version)
    with pytest.raises(WeightSyncError, match="restore the store") as caught:
        await here.model.stager.stage(1, 5)
    assert caught.value.reason is Reason.DATA_CORRUPT
    path.write_bytes(data)
    await looking.scrub(record)
    assert record.damaged == ""
    with await here.model.stager.stage(1, 5):
        assert here.read(1) == [shard.data for shard in simple(1)]


async def test_it_goes_round_and_passes_over_what_is_deleted(here: World) -> None:
    await here.push(simple(1), 1)
    await here.push(simple(2), 2)
    path = shard_file(here, 2)
    path.write_bytes(flipped(path.read_bytes(), -1 % path.stat().st_size))
    running = asyncio.create_task(_scrubber(here).run())
    await here.model.collector.delete(1)
    end = time.monotonic() + 10
    while not here.model.table.get(2).damaged:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_fault_of_this_host_is_no_damage(
    here: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await here.push(simple(1), 1)
    record = here.model.table.get(1)
    looking = _scrubber(here)
    whole = os.pread

    def fail(number: int) -> Callable[..., bytes]:
        def pread(*_: object) -> bytes:
            raise OSError(number, os.strerror(number))

        return pread

    for number in (errno.EMFILE, errno.ENOMEM):
        monkeypatch.setattr(os, "pread", fail(number))
        await looking.scrub(record)
        assert record.damaged == ""
        assert "is checked later" in caplog.text
    monkeypatch.setattr(os, "pread", fail(errno.EIO))
    await looking.scrub(record)
    assert "Input/output error" in record.damaged
    # Nor is it healed by not being looked at.
    monkeypatch.setattr(os, "pread", fail(errno.EMFILE))
    await looking.scrub(record)
    assert record.damaged
    monkeypatch.setattr(os, "pread", whole)
    await looking.scrub(record)
    assert record.damaged == ""


async def test_one_that_cannot_be_checked_hides_no_other(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.push(simple(1), 1)
    await here.push(simple(2), 2)
    path = shard_file(here, 2)
    path.write_bytes(flipped(path.read_bytes(), -1 % path.stat().st_size))
    store = here.model.store
    manifest = store.manifest

    async def odd(model: str, version: int) -> Any:
        if version == 1:
            raise RuntimeError("odd")
        return await manifest(model, version)

    monkeypatch.setattr(store, "manifest", odd)
    running = asyncio.create_task(_scrubber(here).run())
    await until(lambda: bool(here.model.table.get(2).damaged))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
