"""What is said of disks that are full, read-only, or hang."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.deltas.pushing import until
from weightsync_server.ops import disk_watch
from weightsync_server.ops.disk_watch import DataFolder, DiskWatch, read_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATH = Path("/data")


def _told(**changes: int) -> Any:
    blocks = {"f_frsize": 10, "f_blocks": 1000, "f_bfree": 400, "f_bavail": 300}
    return SimpleNamespace(**{**blocks, "f_flag": 0, "f_files": 50, "f_favail": 20, **changes})


@pytest.fixture(name="disk")
def _disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the disk tells, which a test changes; it answers while `answers` is set."""
    disk = SimpleNamespace(told=_told(), answers=threading.Event())
    disk.answers.set()

    def asked(_: str) -> Any:
        assert disk.answers.wait(60)
        return disk.told

    monkeypatch.setattr(os, "statvfs", asked)
    monkeypatch.setattr(disk_watch, "_EVERY_S", 0.02)
    yield disk
    disk.answers.set()


def test_room_is_what_this_user_may_write(disk: SimpleNamespace) -> None:
    reading = read_disk(DataFolder("store", _PATH, 2999))
    assert (reading.free_bytes, reading.used_bytes, reading.error) == (3000, 6000, "")
    # Some file systems have no fixed number of files.
    disk.told = _told(f_files=0, f_favail=0)
    assert read_disk(DataFolder("store", _PATH, 2999)).error == ""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "free space on the disk of /data: 3000 bytes are left, and 3000 of them are kept"),
        ({"f_flag": os.ST_RDONLY}, "mount /data writable: it is read-only"),
        ({"f_favail": 0, "f_bavail": 301}, "remove files from the disk of /data"),
    ],
)
def test_a_disk_without_room_says_what_helps(
    disk: SimpleNamespace, changes: dict[str, int], sentence: str
) -> None:
    disk.told = _told(**changes)
    assert sentence in read_disk(DataFolder("store", _PATH, 3000)).error


def test_a_folder_that_is_gone_takes_nothing(tmp_path: Path) -> None:
    error = read_disk(DataFolder("store", tmp_path / "gone")).error
    why = "which cannot be read: No such file or directory"
    assert error == f"check the disk of {tmp_path}/gone, {why}"


async def test_changes_are_told_once_and_a_disk_that_hangs_is_one(
    disk: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    told: list[tuple[str, str]] = []
    watch = DiskWatch([DataFolder("store", _PATH, 1000)], lambda *news: told.append(news))
    watch.start()
    try:
        assert watch.reading("store").error == ""
        disk.answers.clear()
        await until(lambda: len(told) == 1)
        assert "has not answered for" in told[0][1]
        # The last that is known is shown still.
        assert watch.readings()[0].free_bytes == 3000
        disk.answers.set()
        await until(lambda: len(told) == 2)
        disk.told = _told(f_bavail=100)
        await until(lambda: len(told) == 3)
        await asyncio.sleep(0.2)  # some more rounds, which tell nothing new
        assert [bool(error) for _, error in told] == [True, False, True]
    finally:
        watch.stop()
    assert "nothing more is written to store: free space on the disk of /data" in caplog.text
    assert "store can be written again: /data" in caplog.text


async def test_a_loop_that_stood_still_blames_no_disk(disk: SimpleNamespace) -> None:
    told: list[tuple[str, str]] = []
    watch = DiskWatch([DataFolder("store", _PATH, 1000)], lambda *news: told.append(news))
    watch.start()
    disk.answers.clear()
    threading.Event().wait(1)  # the loop itself stands still, for many rounds
    disk.answers.set()
    await until(lambda: watch._unanswered["store"] <= 2)
    watch.stop()
    assert told == []
