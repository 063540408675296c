"""Chains are bounded: the newest version is kept in full now and then, and old ones can go."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import names
from tests.unit.server.deltas.pushing import (
    Version,
    history,
    push_chain,
    push_delta,
    sparse_history,
    until,
)
from tests.unit.server.world import Threads, World, world
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.catalog.version_events import ChainFolded
from weightsync_server.deltas import ChainSettings
from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.garbage_collector import Surplus


def lengths(here: World) -> dict[int, int]:
    """Return the length of each version's chain."""
    return {r.version: r.to_info().chain_length for r in reversed(here.model.table.list())}


async def settled(here: World) -> None:
    """Return when nothing is folded or deleted any more."""
    await until(lambda: here.model.compactor._task is None)
    await here.model.collector.close()


async def check(here: World, contents: dict[int, Version]) -> None:
    """Read every version back and compare every byte."""
    for version, expected in contents.items():
        lease = await here.model.stager.stage(version, 20, for_engine=False)
        assert here.read(version) == [shard.data for shard in expected]
        lease.release()


async def test_a_chain_that_is_too_long_is_folded(tmp_path: Path) -> None:
    contents = history(7)
    chains = ChainSettings(length=3, share=100)
    folds: list[int] = []
    async with world(tmp_path, chains=chains, retention=Retention(20)) as here:
        here.model.events.on(ChainFolded, lambda _: folds.append(here.model.table.newest))
        for at, each in enumerate(contents):
            if at:
                await push_delta(here, contents[at - 1], each, at + 1)
            else:
                await here.push(each, 1)
            await settled(here)
        assert lengths(here) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1, 7: 2, 8: 3}
        assert folds == [5]
        info = here.model.table.get(5).to_info()
        assert (info.kind, info.base_version) == (pb.PUSH_KIND_FULL, 0)
        assert info.stored_bytes == info.size_bytes
        # Still told: it was pushed as a delta.
        assert info.changed_fraction > 0
        folder = tmp_path / "store" / "m" / "v5"
        shards = [f"{index}.safetensors" for index in range(3)]
        assert names(folder) == [*shards, "commit.json", "manifest.json"]
        for index, shard in enumerate(contents[4]):
            assert (folder / f"{index}.safetensors").read_bytes() == shard.data
    async with world(tmp_path, retention=Retention(20)) as here:
        assert lengths(here)[8] == 3
        await check(here, dict(enumerate(contents, 1)))


async def test_a_chain_that_weighs_too_much_is_folded(tmp_path: Path) -> None:
    contents = history(2)
    async with world(tmp_path, chains=ChainSettings(share=1e-6)) as here:
        await push_chain(here, contents[:2])
        await settled(here)
        assert lengths(here) == {1: 0, 2: 0}


@pytest.mark.parametrize("keep", [2, 3])
async def test_chains_do_not_make_the_store_grow(tmp_path: Path, keep: int) -> None:
    contents = history(14)
    most = 0
    async with world(tmp_path, retention=Retention(keep), chains=ChainSettings(share=100)) as here:
        await here.push(contents[0], 1)
        for at in range(1, len(contents)):
            await push_delta(here, contents[at - 1], contents[at], at + 1)
            await settled(here)
            most = max(most, len(here.model.table.list()))
        # Those that are kept, and as many again as bases, twice over until the oldest one goes.
        assert most <= 3 * keep + 1
        left = {record.version: contents[record.version - 1] for record in here.model.table.list()}
        await check(here, left)
    async with world(tmp_path) as here:
        assert {record.version for record in here.model.table.list()} == set(left)
        await check(here, left)


class Gated(Threads):
    """Lets whole shards of one version be written only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.waiting = asyncio.Event()

    async def persist(self, segment: Segment, size: int, target: str) -> None:
        if "delta-" not in target and "/v1/" not in target:
            self.waiting.set()
            await self.open.wait()
        await super().persist(segment, size, target)


@contextlib.asynccontextmanager
async def gated(folder: Path, slots: int = 2) -> AsyncIterator[tuple[World, Gated]]:
    """A world in which the third delta in a row is folded, once its fetchers may write."""
    fetchers, chains = Gated(), ChainSettings(length=2, share=100)
    async with world(folder, fetchers=fetchers, chains=chains, slots=slots) as here:
        yield here, fetchers


async def test_pushes_go_on_while_a_version_is_folded(tmp_path: Path) -> None:
    contents = history(6)
    async with gated(tmp_path, slots=3) as (here, fetchers):
        await push_chain(here, contents[:4])
        await fetchers.waiting.wait()
        # It is being folded: its slot stays, and it can neither be deleted nor lost.
        assert here.model.table.get(4).place.leases == 1
        await push_delta(here, contents[3], contents[4], 5)
        assert lengths(here) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
        fetchers.open.set()
        await until(lambda: here.model.table.get(4).base is None)
        await settled(here)
        assert lengths(here)[5] == 1
        await check(here, dict(enumerate(contents[:5], 1)))


async def test_a_fold_that_stands_back_at_its_last_step_leaves_nothing(tmp_path: Path) -> None:
    contents = history(4)
    async with gated(tmp_path) as (here, fetchers):
        await push_chain(here, contents[:4])
        await fetchers.waiting.wait()
        folder = tmp_path / "store" / "m" / "v4"
        async with here.model.materializer.lock:
            fetchers.open.set()
            await until(lambda: any(name[0].isdigit() for name in names(folder)))
            await asyncio.sleep(0.1)
            here.model.compactor.stand_back()
        await settled(here)
        assert here.model.table.get(4).base is not None
        assert not [name for name in names(folder) if name[0].isdigit()]
        await check(here, dict(enumerate(contents[:4], 1)))


async def test_a_fold_gives_its_slot_to_a_push_that_waits(tmp_path: Path) -> None:
    contents = history(4)
    async with gated(tmp_path) as (here, fetchers):
        await push_chain(here, contents[:3])
        here.model.serving.engine("engine").set_live(2)
        await push_delta(here, contents[2], contents[3], 4)
        await fetchers.waiting.wait()
        # One slot is live, the other one is being folded from.
        await asyncio.wait_for(push_delta(here, contents[3], contents[4], 5), 10)
        assert here.model.table.get(4).base is not None
        folder = tmp_path / "store" / "m" / "v4"
        assert not [name for name in names(folder) if name[0].isdigit()]
        # The next one is folded instead.
        fetchers.open.set()
        await until(lambda: here.model.table.get(5).base is None)
        await check(here, {4: contents[3], 5: contents[4]})


async def test_twice_as_long_a_chain_is_not_acknowledged(tmp_path: Path) -> None:
    contents = history(6)
    chains = ChainSettings(length=2, share=100)
    async with world(tmp_path, chains=chains, retention=Retention(20)) as here:
        # No fold comes to its end.
        here.model.compactor.consider = lambda *_: None  # type: ignore[method-assign]  # for this test
        await push_chain(here, contents)
        assert lengths(here) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 0, 7: 1}
        assert not list((tmp_path / "store" / "m" / "v6").glob("delta*"))
        assert here.model.table.get(6).to_info().changed_fraction > 0
    async with world(tmp_path, retention=Retention(20)) as here:
        await check(here, dict(enumerate(contents, 1)))


async def test_damage_in_memory_is_not_folded_into_the_store(tmp_path: Path) -> None:
    contents = history(2)
    fetchers = Gated()
    async with world(tmp_path, fetchers=fetchers, chains=ChainSettings(1, 100)) as here:
        await push_chain(here, contents)
        await fetchers.waiting.wait()
        view = here.model.table.get(3).place.segments[2].view
        view[len(contents[2][2].data) - 1] ^= 1
        fetchers.open.set()
        await settled(here)
        assert lengths(here)[3] == 2
        assert not list((tmp_path / "store" / "m" / "v3").glob("[0-9]*"))
    async with world(tmp_path) as here:
        await check(here, {3: contents[2]})


class Failing:
    """Fails the Nth of the calls that change files."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int) -> None:
        self.calls = 0
        for name in ("fsync", "rename", "flush_directory", "unlink"):
            real = getattr(durable_files, name)

            def step(*args: Any, real: Any = real) -> Any:
                self.calls += 1
                if self.calls == nth:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*args)

            patch.setattr(durable_files, name, step)


async def fold_once(folder: Path, nth: int, expected: Version) -> tuple[int, bool]:
    """Fold version 2 with a failing step; return how many steps there were and whether it did."""
    async with world(folder) as here:
        record = here.model.table.get(2)
        lease = await here.model.stager.stage(2, 20)
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, nth)
            await asyncio.gather(here.model.compactor._fold(record), return_exceptions=True)
        lease.release()
        # Read from the store in this life, too.
        here.model.slots.release(record)
        record.residency = pb.RESIDENCY_ABSENT
        await check(here, {2: expected})
        return failing.calls, record.base is None


async def test_a_fold_that_fails_at_any_step_loses_nothing(tmp_path: Path) -> None:
    contents = sparse_history(1)
    async with world(tmp_path / "first") as here:
        await push_chain(here, contents)
    outcomes = []
    for nth in range(1, 40):
        folder = tmp_path / str(nth)
        await asyncio.to_thread(shutil.copytree, tmp_path / "first" / "store", folder / "store")
        calls, folded = await fold_once(folder, nth, contents[1])
        outcomes.append(folded)
        async with world(folder) as here:
            await check(here, {1: contents[0], 2: contents[1]})
            found = names(folder / "store" / "m" / "v2")
            assert any("delta" in name for name in found) != ("0.safetensors" in found)
        if calls < nth:
            break
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) > 8


async def test_deleting_races_with_reading(tmp_path: Path) -> None:
    contents = history(8)
    retention = Retention(2)
    async with world(tmp_path, retention=retention, chains=ChainSettings(2, 100), slots=3) as here:
        await here.push(contents[0], 1)
        known = {1: contents[0]}

        async def read() -> None:
            for _ in range(60):
                versions = [r.version for r in here.model.table.list() if r.commit]
                version = versions[-1]
                try:
                    lease = await here.model.stager.stage(version, 20, for_engine=False)
                except WeightSyncError:
                    # It may have been collected between the look and the lease, nothing else.
                    if here.model.table.find(version) is not None:
                        raise
                    continue
                assert here.read(version) == [shard.data for shard in known[version]]
                lease.release()
                await asyncio.sleep(0.005)

        async def push() -> None:
            for at in range(1, len(contents)):
                known[at + 1] = contents[at]
                await push_delta(here, contents[at - 1], contents[at], at + 1)

        await asyncio.gather(read(), push())
        await settled(here)
        left = {record.version: known[record.version] for record in here.model.table.list()}
        await check(here, left)


async def test_a_fold_that_stands_back_at_once_lets_go(tmp_path: Path) -> None:
    contents = history(1)
    async with world(tmp_path, chains=ChainSettings(share=1e-6)) as here:
        # Somebody waits for a slot before the fold has done its first step.
        consider = here.model.compactor.consider

        def and_back(surplus: Surplus, most_carried: int) -> None:
            consider(surplus, most_carried)
            here.model.compactor.stand_back()

        here.model.compactor.consider = and_back  # type: ignore[method-assign]  # for this test
        await push_chain(here, contents)
        await settled(here)
        assert lengths(here) == {1: 0, 2: 1}
        assert here.model.table.get(2).place.leases == 0
        here.model.compactor.consider = consider  # type: ignore[method-assign]  # as it was
        here.model.collector.collect()
        await until(lambda: here.model.table.get(2).base is None)


async def test_no_fold_begins_at_the_end(tmp_path: Path) -> None:
    contents = history(1)
    async with world(tmp_path, chains=ChainSettings(share=1e-6)) as here:
        await here.model.compactor.close()
        await push_chain(here, contents)
        await settled(here)
        assert lengths(here) == {1: 0, 2: 1}
