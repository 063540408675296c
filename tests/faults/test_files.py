"""The Nth step on files fails: a clean refusal, no false commit, and the next try succeeds."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import STEPS, FailingDisk
from tests.unit.server.world import World, begin, content, simple, world
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.journal import Entry, Journal, JournalFile
from weightsync_server.ops import durable_files
from weightsync_server.ops.durable_files import StateLock
from weightsync_server.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMITS = {"keep_bytes": 1000, "loss_bytes": 2000}
SHARDS = simple(2)
CLEAN = {
    errno.EIO: {Reason.FAULT},
    errno.ENOSPC: {Reason.DISK_EXHAUSTED},
    errno.EMFILE: {Reason.DISK_EXHAUSTED},
}


async def push(here: World) -> pb.CommitPushResponse:
    begun = await here.pushes.begin(begin(version=2, shard_count=2), None)
    for shard in SHARDS:
        await here.join(begun.push_id, shard.all(500))
    return await here.pushes.commit(pb.CommitPushRequest(push_id=begun.push_id))


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for_ever"])
@pytest.mark.parametrize("code", sorted(CLEAN), ids=lambda code: errno.errorcode[code])
async def test_any_step_of_a_push_fails(tmp_path: Path, code: int, for_ever: bool) -> None:
    refused = 0
    async with world(tmp_path, limits=LIMITS) as here:
        await here.push(simple(1), 1)
        for nth in range(1, 200):
            with pytest.MonkeyPatch.context() as patch:
                # Where nothing can be removed any more either, a record that has its name but was
                # not flushed stays: the one case that LocalStore.commit documents.
                steps = tuple(step for step in STEPS if step != "unlink" or not for_ever)
                disk = FailingDisk(nth, OSError(code, os.strerror(code)), steps, for_ever)
                disk.install(patch)
                (outcome,) = await asyncio.gather(push(here), return_exceptions=True)
            committed = here.model.table.newest == 2
            if isinstance(outcome, pb.CommitPushResponse):
                assert committed
                await here.model.collector.delete(2)
                # The next push takes the number again, as no trainer could.
                here.model.table._spent = here.model.pins.highest = 0
            else:
                assert isinstance(outcome, WeightSyncError)
                assert outcome.reason in CLEAN[code], outcome
                assert not committed
                assert len(await here.model.store.open()) == 1
                refused += 1
            if disk.calls < nth:
                break
        assert refused > 10
        assert (await push(here)).content_digest == content(SHARDS)
    assert [record.version for record in await open_store(str(tmp_path / "store")).open()] == [1, 2]


@pytest.mark.parametrize("name", ["write_epoch", "write_marks", "delete"])
async def test_any_step_of_a_small_change_fails(tmp_path: Path, name: str) -> None:
    async with world(tmp_path) as here:
        await here.push(simple(1), 1)
        store = here.model.store
        acts: dict[str, Callable[[], object]] = {
            "write_epoch": lambda: store.write_epoch("m", 7),
            "write_marks": lambda: store.write_marks("m", {"highest": 9}),
            "delete": lambda: store.delete("m", 1),
        }
        for nth in range(1, 50):
            with pytest.MonkeyPatch.context() as patch:
                disk = FailingDisk(nth, OSError(errno.EIO, "Input/output error"))
                disk.install(patch)
                (outcome,) = await asyncio.gather(acts[name](), return_exceptions=True)  # type: ignore[call-overload]
            if outcome is None:
                break
            assert isinstance(outcome, WeightSyncError)
            assert outcome.reason is Reason.FAULT
        assert nth > 1
        epoch, marks = await store.read_epoch("m"), await store.read_marks("m")
        assert (epoch == 7) == (name == "write_epoch")
        assert (marks == {"highest": 9}) == (name == "write_marks")
        assert len(await store.open()) == (0 if name == "delete" else 1)


@pytest.mark.parametrize("damage", ["torn", "garbage", "zeroed"])
def test_a_damaged_journal_gives_its_last_good_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    # A thousand journals, and no power is lost here.
    monkeypatch.setattr(durable_files, "fsync", lambda _: None)
    monkeypatch.setattr(durable_files, "flush_directory", lambda _: None)
    path = tmp_path / "journal"
    journal = JournalFile(path)
    entries = [Entry("DONE", str(version), version, version - 1) for version in range(1, 5)]
    for entry in entries:
        journal.write(entry)
    journal.close()
    whole = path.read_bytes()
    ends = [0, *(at + 1 for at, byte in enumerate(whole) if byte == ord("\n"))]
    for cut in range(len(whole) + 1):
        if damage == "torn":
            data = whole[:cut]
        elif damage == "garbage":
            # A byte of it may be the end of a line that alone was missing.
            data = whole[:cut] + os.urandom(100)
        else:
            data = whole[:cut] + bytes(max(0, len(whole) - cut))
        path.write_bytes(data)
        good = sum(data.startswith(whole[:end]) for end in ends) - 1
        again = JournalFile(path)
        assert Journal(again).live[0] == good
        # It goes on from there, and what is written now is found again.
        again.write(Entry("DONE", "next", 9, good))
        again.close()
        last = JournalFile(path)
        assert Journal(last).live == (9, good)
        last.close()


def test_a_state_directory_that_cannot_be_made_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(WeightSyncError) as caught:
        StateLock(tmp_path / "file" / "state")
    assert "state_dir" in caught.value.message


async def test_a_store_in_a_read_only_place_is_refused_in_one_sentence() -> None:
    # Not by mode: tests may run as root, whom no mode stops.
    with pytest.raises(WeightSyncError) as caught:
        await open_store("/proc/weightsync").open()
    assert "opening the store /proc/weightsync failed" in caught.value.message


async def test_a_store_that_is_deleted_while_it_is_used_refuses_cleanly(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.push(simple(1), 1)
        os.rename(tmp_path / "store", tmp_path / "gone")  # noqa: PTH104 - a plain act
        with pytest.raises(WeightSyncError) as caught:
            await push(here)
        assert caught.value.reason is Reason.FAULT
        # What lies in memory is still served.
        assert here.read(1) == [shard.data for shard in simple(1)]
        os.rename(tmp_path / "gone", tmp_path / "store")  # noqa: PTH104 - a plain act
        assert (await push(here)).version == 2
