"""Power is lost at every step: unflushed bytes and names are gone. What was acknowledged is not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.deltas import every_dtype, stepped
from tests.support.disks import STEPS, FailingDisk, ForgetfulDisk, PowerLossError
from tests.unit.server.deltas.pushing import push_chain, push_delta, until
from tests.unit.server.world import World, begin, content, simple, world
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.deltas import ChainSettings
from weightsync_server.engine.journal import Entry, Journal, JournalFile

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path
    from typing import Any

LIMITS = {"keep_bytes": 1000, "loss_bytes": 2000}
OLD, NEW = simple(1), simple(2)
#: Two steps of training; a chain of both is too long and the last one is kept in full instead.
CHAINED = [every_dtype(1, shards=2, elements=40)]
CHAINED += [stepped(CHAINED[0], 2)]
CHAINED += [stepped(CHAINED[1], 3)]
SHORT = ChainSettings(length=1, share=100)


async def lived(
    folder: Path, work: Callable[[World], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run one life of the server; at a loss of power nothing of it goes on."""
    async with world(folder, limits=LIMITS, **options) as here:
        await work(here)


async def push(here: World) -> None:
    begun = await here.pushes.begin(begin(version=2, idempotency_key="k", shard_count=2), None)
    for shard in NEW:
        await here.join(begun.push_id, shard.all(500))
    await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))


async def delete(here: World) -> None:
    await here.model.collector.delete(1)


async def acquire(here: World) -> None:
    assert await here.model.epochs.acquire("another") == 1


async def pin(here: World) -> None:
    await here.model.serving.pin(1, pinned=True)


def check(here: World, work: object, *, done: bool) -> None:
    """Check what a new life of the server finds."""
    model = here.model
    one, two = model.table.find(1), model.table.find(2)
    if work is delete:
        assert not (done and one)
    else:
        assert one is not None
        assert one.content_digest == content(OLD)
    committed = two is not None and two.commit is not None
    assert committed or not (done and work is push)
    if committed:
        assert two is not None
        assert two.content_digest == content(NEW)
    assert model.epochs.newest == 1 or not (done and work is acquire)
    assert work is not pin or not done or (one is not None and one.pinned)


@pytest.mark.parametrize("work", [push, delete, acquire, pin], ids=lambda work: work.__name__)
async def test_power_lost_at_every_step(
    tmp_path: Path, work: Callable[[World], Coroutine[Any, Any, None]]
) -> None:
    outcomes = set()
    for nth in range(1, 200):
        folder = tmp_path / str(nth)
        async with world(folder) as here:
            await here.push(OLD, 1)
        disk = ForgetfulDisk(folder)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            lost = FailingDisk(nth, OSError(5, "power lost"), STEPS, for_ever=True)
            lost.install(patch)
            (outcome,) = await asyncio.gather(lived(folder, work), return_exceptions=True)
        disk.lose_power()
        async with world(folder, limits=LIMITS) as here:
            check(here, work, done=outcome is None)
            # The same number and content can be brought after all.
            if work is push:
                await push(here)
                with await here.model.stager.stage(2, 5):
                    assert here.read(2) == [shard.data for shard in NEW]
        disk.close()
        outcomes.add(outcome is None)
        if lost.calls < nth:
            break
    assert outcomes == {True, False}
    assert nth > 5


async def push_the_last(here: World) -> None:
    await push_delta(here, CHAINED[1], CHAINED[2], 3)


async def fold_the_last(here: World) -> None:
    await push_the_last(here)
    await until(lambda: here.model.compactor._task is None)


@pytest.mark.parametrize("work", [push_the_last, fold_the_last], ids=lambda work: work.__name__)
async def test_power_lost_at_every_step_of_a_delta(
    tmp_path: Path, work: Callable[[World], Coroutine[Any, Any, None]]
) -> None:
    chains = SHORT if work is fold_the_last else ChainSettings()
    found: set[tuple[bool, str]] = set()
    for nth in range(1, 200):
        folder = tmp_path / str(nth)
        async with world(folder) as here:
            await push_chain(here, CHAINED[:2])
        disk = ForgetfulDisk(folder)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            lost = FailingDisk(nth, OSError(5, "power lost"), STEPS, for_ever=True)
            lost.install(patch)
            life = lived(folder, work, chains=chains)
            (outcome,) = await asyncio.gather(life, return_exceptions=True)
        disk.lose_power()
        async with world(folder, slots=3, retention=Retention(9)) as here:
            newest = here.model.table.find(3)
            held = "nothing" if newest is None or newest.commit is None else "delta"
            if held == "delta" and newest is not None and newest.base is None:
                held = "full"
            assert held != "nothing" or outcome is not None, "it was acknowledged"
            found.add((outcome is None, held))
            for version in range(1, 3 if held == "nothing" else 4):
                with await here.model.stager.stage(version, 5, for_engine=False):
                    assert here.read(version) == [s.data for s in CHAINED[version - 1]]
        disk.close()
        if lost.calls < nth:
            break
    assert (False, "nothing") in found
    assert (True, "full" if work is fold_the_last else "delta") in found
    if work is fold_the_last:
        assert (True, "delta") in found, "the power was never lost in the fold itself"


def test_a_journal_that_loses_power_at_every_step(tmp_path: Path) -> None:
    for nth in range(1, 60):
        folder = tmp_path / str(nth)
        folder.mkdir()
        before = Entry("DONE", "a", 1, 0)
        journal = JournalFile(folder / "journal")
        journal.write(before)
        journal.close()
        disk = ForgetfulDisk(folder)
        written = before
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            lost = FailingDisk(nth, PowerLossError(), STEPS, for_ever=True)
            lost.install(patch)
            try:
                journal = JournalFile(folder / "journal")
                for version in range(2, 6):
                    journal.write(entry := Entry("DONE", str(version), version, 1))
                    written = entry
            except PowerLossError:
                pass
        disk.lose_power()
        found = Journal(JournalFile(folder / "journal")).last
        assert found is not None
        assert found.version in (written.version, written.version + 1)
        disk.close()
        if lost.calls < nth:
            return
    pytest.fail("it never came to its end")
