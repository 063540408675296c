"""Whether a process has memory open is seen without a touch of its other files, off the loop."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import ShardEntry
from weightsync.shm.segments import Segment
from weightsync_server.push import verification
from weightsync_server.push.shard_part import ShardPart, ShardState
from weightsync_server.push.verification import holds

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(name="segment")
def _segment() -> Iterator[Segment]:
    segment = Segment.create(1 << 16)
    yield segment
    segment.close()


def test_memory_is_found_open_or_mapped_and_that_of_others_is_not(segment: Segment) -> None:
    fd = os.memfd_create("weightsync")
    os.ftruncate(fd, 4096)
    assert holds(os.getpid(), fd)
    # Of the same name, and of the same process.
    assert not holds(os.getppid(), fd)
    with mmap.mmap(fd, 4096):
        ours = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.close(fd)
        assert holds(os.getpid(), ours)
    os.close(ours)
    assert holds(os.getpid(), segment.fd)


def test_no_other_file_of_the_process_is_touched(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stat of a file on a mount that hangs never returns."""
    touched: list[str] = []
    stat = os.stat

    def watched(path: Any, **options: Any) -> os.stat_result:
        if options.get("follow_symlinks", True) and Path(path).is_symlink():
            touched.append(str(Path(path).readlink()))
        return stat(path, **options)

    with (tmp_path / "a").open("w"), (tmp_path / "memfd:b").open("w"):
        monkeypatch.setattr(os, "stat", watched)
        # All descriptors are gone through.
        monkeypatch.setattr(os.path, "samestat", lambda *_: False)
        holds(os.getpid(), segment.fd)
        monkeypatch.undo()
    assert touched
    assert all(link.startswith("/memfd:") for link in touched), touched


async def test_others_go_on_while_the_descriptors_are_gone_through(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trainer with tens of thousands of them that takes long."""
    others = threading.Event()
    went_on: list[bool] = []

    def slow(pid: int, fd: int) -> bool:
        went_on.append(others.wait(5))
        return holds(pid, fd)

    monkeypatch.setattr(verification, "holds", slow)
    monkeypatch.setattr(verification, "_LOOKS", 0)
    lent = segment.lend()
    try:
        part = ShardPart.of_slices(ShardState(0, ShardEntry("s", 8, 0)), 3, (), (), ())
        part.holder = os.getpid()
        asyncio.get_running_loop().call_later(0.05, others.set)
        with pytest.raises(WeightSyncError, match="writer 3 still holds") as caught:
            await verification.check_taken_back(0, segment, [part])
        assert caught.value.reason is Reason.WRITER_LEFT
        assert went_on == [True]
    finally:
        os.close(lent)
