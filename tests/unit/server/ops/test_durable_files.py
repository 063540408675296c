"""Writing into a file: whole blocks past the page cache where that can be, and every byte."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from typing import TYPE_CHECKING

import pytest

from weightsync.shm.segments import Segment
from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from pathlib import Path

_SIZE = (1 << 20) + 777


def _write(path: Path, view: memoryview, cuts: list[int]) -> None:
    fd = durable_files.create(path)
    try:
        durable_files.allocate(fd, len(view))
        for begin, end in zip([0, *cuts], [*cuts, len(view)], strict=True):
            done = begin
            while done < end:
                done += durable_files.pwrite(fd, view[done:end], done)
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        durable_files.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("cuts", [[], [4096], [1], [5000, 9000, 70_001], [4096 * 200 + 3]])
def test_every_byte_is_in_the_file_wherever_it_is_cut(tmp_path: Path, cuts: list[int]) -> None:
    segment = Segment.create(_SIZE)
    data = random.Random(1).randbytes(_SIZE)
    segment.view[:_SIZE] = data
    _write(tmp_path / "x", segment.view[:_SIZE], cuts)
    assert (tmp_path / "x").read_bytes() == data
    segment.close()


def test_memory_that_no_disk_takes_directly_is_written_all_the_same(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(_SIZE)
    # It begins at no block.
    _write(tmp_path / "x", memoryview(b"xyz" + data)[3:], [5000])
    assert (tmp_path / "x").read_bytes() == data


def test_whole_blocks_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    pwrite = os.pwrite

    def watch(fd: int, data: memoryview, offset: int) -> int:
        told.append((offset, len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", watch)
    segment = Segment.create(_SIZE)
    _write(tmp_path / "x", segment.view[:_SIZE], [5000])
    blocks = (_SIZE - 8192) // 4096 * 4096
    assert told[:5] == [
        (0, 4096, True),
        (4096, 904, False),
        (5000, 3192, False),
        (8192, blocks, True),
        (8192 + blocks, _SIZE - 8192 - blocks, False),
    ]
    segment.close()


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space left"):
        _write(tmp_path / "x", memoryview(bytes(8192)), [])
