"""The folder: power loss, steps that fail, and what is left in it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import FailingDisk, ForgetfulDisk
from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.coordination import Creation
from weightsync_server.coordination.folder_keys import FolderKeys
from weightsync_server.ops import durable_files
from weightsync_server.store.objects.object_keys import MARKER

if TYPE_CHECKING:
    from pathlib import Path

#: What creating a key does to a folder.
STEPS = ("create_unnamed", "write", "fsync", "link", "flush_directory")
KEY = "applies/1/decision"


async def test_a_created_key_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ForgetfulDisk(tmp_path)
    disk.install(monkeypatch)
    folder = tmp_path / "register"
    assert (await FolderKeys(folder).create(KEY, b"COMMIT")).created
    disk.lose_power()
    assert await FolderKeys(folder).create(KEY, b"ABORT") == Creation(False, b"COMMIT")
    disk.close()


async def test_each_folder_on_the_way_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(durable_files, "flush_directory", flushed.append)
    FolderKeys(tmp_path / "a" / "b" / "register")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(flushed)


@pytest.mark.parametrize("how", ["get", "list", "create"])
async def test_nobody_reads_what_a_loss_of_power_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = tmp_path / "register"
    register = FolderKeys(folder)
    disk = ForgetfulDisk(tmp_path)
    disk.install(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        # The creator dies between name and flush.
        FailingDisk(1, OSError(errno.EIO, "died"), ("flush_directory",)).install(patch)
        with pytest.raises(WeightSyncError):
            await register.create(KEY, b"COMMIT")
    if how == "get":
        assert await register.get(KEY) == b"COMMIT"
    elif how == "list":
        assert await register.list("") == {KEY: b"COMMIT"}
    else:
        assert await register.create(KEY, b"ABORT") == Creation(False, b"COMMIT")
    disk.lose_power()
    assert await FolderKeys(folder).get(KEY) == b"COMMIT"
    disk.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize("nth", range(1, len(STEPS) + 1))
async def test_any_step_fails_and_no_half_key_is_there(tmp_path: Path, nth: int, code: int) -> None:
    register = FolderKeys(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        FailingDisk(nth, OSError(code, os.strerror(code)), STEPS).install(patch)
        with pytest.raises(WeightSyncError, match=f"creating {KEY} in file:///") as caught:
            await register.create(KEY, b"COMMIT")
    assert caught.value.reason in (Reason.FAULT, Reason.DISK_EXHAUSTED)
    assert await register.get(KEY) in (None, b"COMMIT")
    final = await register.create(KEY, b"COMMIT")
    assert final.value == await register.get(KEY) == b"COMMIT"
    assert os.listdir(tmp_path / "records") == ["applies+1+decision"]  # noqa: PTH208 - names


async def test_a_folder_that_is_gone_is_no_empty_register(tmp_path: Path) -> None:
    register = FolderKeys(tmp_path / "register")
    await register.create(KEY, b"COMMIT")
    shutil.rmtree(tmp_path / "register")
    for attempt in (register.get(KEY), register.list(""), register.create(KEY, b"")):
        with pytest.raises(WeightSyncError, match="No such file") as caught:
            await attempt
        assert caught.value.reason == Reason.FAULT
    with pytest.raises(WeightSyncError, match="No such file"):
        await anext(register.watch(""))


async def test_members_of_another_boot_and_long_gone_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = FolderKeys(tmp_path)
    living = await register.member("members/living", b"1", 1000)
    old = tmp_path / "members" / "members+old"
    shutil.copy2(tmp_path / "members" / "members+living", old)
    assert await register.list("") == {"members/living": b"1", "members/old": b"1"}
    old.write_bytes(old.read_bytes().replace(b"-", b"+"))
    assert await register.list("") == {"members/living": b"1"}
    assert not old.exists()
    dead = await register.member("members/dead", b"1", 1000)
    assert dead._task is not None
    dead._task.cancel()
    await asyncio.sleep(0)
    now = clock.monotonic()
    for passed, there in ((999, True), (1001, True), (1061, False)):
        monkeypatch.setattr(clock, "monotonic", lambda passed=passed: now + passed)
        assert ("members/dead" in await register.list("")) == (passed < 1000)
        assert (tmp_path / "members" / "members+dead").exists() == there
    # It was only stopped: the next renewal puts it there again.
    await dead.renew()
    assert await register.list("") == {"members/dead": b"1"}
    for member in (living, dead):
        await member.close()
    assert os.listdir(tmp_path / "members") == []  # noqa: PTH208 - names


async def test_a_member_that_cannot_be_placed_leaves_nothing(tmp_path: Path) -> None:
    register = FolderKeys(tmp_path)
    for nth in range(1, 5):
        with pytest.MonkeyPatch.context() as patch:
            steps = ("create_unnamed", "write", "link", "rename")
            FailingDisk(nth, OSError(errno.ENOSPC, "full"), steps).install(patch)
            with pytest.raises(WeightSyncError, match="renewing members/m1 failed"):
                await register.member("members/m1", b"", 1)
    assert os.listdir(tmp_path / "members") == []  # noqa: PTH208 - names


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match=r"cannot be written .* choose another"):
        FolderKeys(tmp_path / "file")
    with pytest.MonkeyPatch.context() as patch:
        error = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        FailingDisk(1, error, ("create_unnamed",)).install(patch)
        with pytest.raises(WeightSyncError, match="name a folder on a local disk") as caught:
            FolderKeys(tmp_path / "folder")
        assert caught.value.reason == Reason.NOT_SUPPORTED


def test_a_file_without_a_name_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "name"
    for content in (b"first", b"second"):
        fd = durable_files.create_unnamed(tmp_path)
        durable_files.write(fd, content)
        assert list(tmp_path.iterdir()) == ([] if content == b"first" else [path])
        if content == b"first":
            durable_files.link(fd, path)
        else:
            with pytest.raises(FileExistsError):
                durable_files.link(fd, path)
        os.close(fd)
    assert path.read_bytes() == b"first"


def test_a_store_of_versions_is_no_place_for_it(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / MARKER).write_text("{}")
    with pytest.raises(WeightSyncError, match="is a store of versions") as caught:
        FolderKeys(tmp_path / "store" / "fleet")
    assert caught.value.reason is Reason.REQUEST_INVALID
    assert [one.name for one in (tmp_path / "store").iterdir()] == [MARKER]
