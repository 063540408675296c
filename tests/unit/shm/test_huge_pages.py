"""Memory at addresses at which huge pages are possible, and segments that lie in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightsync.shm.segments import HUGE, MemoryMapping, Segment, reserved_size


@pytest.mark.parametrize("size", [4096, HUGE, 3 * HUGE])
def test_a_mapping_is_the_file_at_a_fitting_address(size: int) -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, size)
        mapping = MemoryMapping(fd, size)
        assert len(mapping.view) == size
        assert size < HUGE or mapping.address % HUGE == 0
        mapping.view[size - 3 :] = b"end"
        assert os.pread(fd, 3, size - 3) == b"end"
        os.pwrite(fd, b"begin", 0)
        assert bytes(mapping.view[:5]) == b"begin"
        mapping.close()
        mapping.close()
    finally:
        os.close(fd)


def test_what_cannot_be_mapped_writable_leaves_no_mapping() -> None:
    segment = Segment.create(HUGE)
    reader = segment.read_only_fd()
    with pytest.raises(PermissionError):
        MemoryMapping(reader, HUGE)
    os.close(reader)
    segment.close()


def _huge_bytes(address: int) -> int:
    inside = False
    with Path("/proc/self/smaps").open() as smaps:
        for line in smaps:
            first = line.split()[0]
            if "-" in first:
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "ShmemPmdMapped:":
                return int(line.split()[1]) << 10
    return 0


@pytest.mark.parametrize("size", [1000, HUGE, 5 * HUGE + 1])
def test_a_segment_tells_the_truth_about_its_pages(size: int) -> None:
    segment = Segment.create(size)
    try:
        assert segment.capacity == reserved_size(size)
        assert not any(segment.view)
        found = _huge_bytes(segment._mapping.address)
        assert found == segment.capacity if segment.huge else found < segment.capacity
        assert segment.huge <= (size >= HUGE)
    finally:
        segment.close()
