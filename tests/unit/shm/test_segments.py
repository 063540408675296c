from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.open_files import open_files, opened_since
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm import segments
from weightsync.shm.segments import GRANULE, MappedSegment, Segment, reserved_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE = mmap.PAGESIZE


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(3 * _PAGE)
    yield made
    made.close()


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:weightsync")


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("size", "capacity"),
    [
        (0, _PAGE),
        (1, _PAGE),
        (_PAGE, _PAGE),
        (_PAGE + 1, 2 * _PAGE),
        (GRANULE - 1, GRANULE),
        (GRANULE, GRANULE),
        (GRANULE + 1, 2 * GRANULE),
    ],
)
def test_capacity_is_what_it_takes(size: int, capacity: int) -> None:
    assert reserved_size(size) == capacity
    made = Segment.create(size)
    try:
        assert made.capacity == len(made.view) == os.fstat(made.fd).st_size == capacity
        assert not any(made.view)
    finally:
        made.close()


def _resident(address: int) -> int:
    """Return the bytes of the mapping at an address that this process can touch without a fault."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(rest.split()[1]) << 10 for rest in lines if rest.startswith("Rss:"))
    msg = f"no mapping begins at {address:x}"
    raise AssertionError(msg)


@pytest.mark.parametrize("size", [1, 3 * _PAGE, GRANULE, 3 * GRANULE - 1, 4 * GRANULE + 1])
def test_every_page_is_touched(size: int) -> None:
    made = Segment.create(size)
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(made.view))
        assert _resident(address) == made.capacity
    finally:
        made.close()


def test_every_page_is_reserved(segment: Segment) -> None:
    assert os.fstat(segment.fd).st_blocks * 512 == segment.capacity


def test_it_neither_shrinks_nor_grows_and_stays_so(segment: Segment) -> None:
    for size in (0, segment.capacity - 1, segment.capacity + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        os.pwrite(segment.fd, b"x", segment.capacity)
    with pytest.raises(OSError):
        os.posix_fallocate(segment.fd, 0, segment.capacity + 1)
    seals = fcntl.fcntl(segment.fd, 1034)
    assert seals & 0b111 == 0b111, "sealed against shrinking, growing and other seals"
    with pytest.raises(PermissionError):
        # F_SEAL_WRITE would make it useless for the next version.
        fcntl.fcntl(segment.fd, 1033, 8)


def test_what_is_written_is_seen_by_a_reader_and_again_after_reuse(segment: Segment) -> None:
    mapped = MappedSegment(segment.read_only_fd(), segment.capacity)
    for text in (b"first", b"second"):
        segment.view[: len(text)] = text
        assert bytes(mapped.view[: len(text)]) == text
    mapped.close()


def test_a_read_only_descriptor_cannot_be_mapped_writable(segment: Segment) -> None:
    fd = segment.read_only_fd()
    try:
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, segment.capacity)
        with pytest.raises(OSError):
            os.write(fd, b"x")
        mmap.mmap(fd, segment.capacity, prot=mmap.PROT_READ).close()
    finally:
        os.close(fd)


def test_a_mapped_segment_is_read_only(segment: Segment) -> None:
    mapped = MappedSegment(segment.read_only_fd(), segment.capacity)
    with pytest.raises(TypeError):
        mapped.view[0] = 1
    mapped.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_cannot_open_a_read_only_descriptor_again_for_writing(
    segment: Segment,
) -> None:
    fd = segment.read_only_fd()
    program = (
        "import os, sys\n"
        "os.setuid(65534)\n"
        "fd = int(sys.argv[1])\n"
        "assert os.pread(fd, 1, 0) == b'\\0'\n"
        "try:\n"
        "    os.open(f'/proc/self/fd/{fd}', os.O_RDWR)\n"
        "except PermissionError:\n"
        "    sys.exit(0)\n"
        "sys.exit('opened for writing')\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, str(fd)], check=False, pass_fds=[fd], timeout=30
        )
    finally:
        os.close(fd)
    assert done.returncode == 0


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE"])
def test_a_host_without_the_memory_is_an_error_not_a_signal(limit: str) -> None:
    done = _run(
        "import os, resource, sys\n"
        "from weightsync.errors import WeightSyncError\n"
        "from weightsync.shm.segments import Segment\n"
        "Segment.create(1).close()\n"
        "which = getattr(resource, sys.argv[1])\n"
        "values = {'RLIMIT_AS': 1 << 30, 'RLIMIT_FSIZE': 1 << 20, 'RLIMIT_NOFILE': 3}\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "old = resource.getrlimit(which)\n"
        "resource.setrlimit(which, (values[sys.argv[1]], old[1]))\n"
        "try:\n"
        "    Segment.create(1 << 30)\n"
        "except WeightSyncError as error:\n"
        "    resource.setrlimit(which, old)\n"
        "    assert len(os.listdir('/proc/self/fd')) == before\n"
        "    print(error.reason.value, error.message)\n",
        limit,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"MEMORY_EXHAUSTED the host refused {1 << 30} bytes")
    named = f"this process may write {1 << 20} bytes per file" in done.stdout
    assert named is (limit == "RLIMIT_FSIZE")
    opened = "raise the limit on open files (`ulimit -n`" in done.stdout
    assert opened is (limit == "RLIMIT_NOFILE")


def test_a_failed_populate_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(segments, "_populate", fail)
    before, mapped = open_files(), _mapped()
    with pytest.raises(WeightSyncError) as caught:
        Segment.create(_PAGE)
    assert caught.value.reason is Reason.MEMORY_EXHAUSTED
    # What earlier tests have left may go meanwhile.
    assert opened_since(before) == []
    # Also while the error lives, and with it its traceback.
    assert _mapped() == mapped


def _resident_shared_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem:"))


def test_memory_is_given_back_by_close() -> None:
    size = 256 << 20
    # Of this process alone: other tests of the machine take and free memory meanwhile. The
    # kernel frees a memfd once it has neither a descriptor nor a mapping.
    opened, mapped, before = open_files(), _mapped(), _resident_shared_bytes()
    made = Segment.create(size)
    during = _resident_shared_bytes()
    made.close()
    assert during - before > size * 0.7
    assert _resident_shared_bytes() - before < size * 0.3
    assert opened_since(opened) == []
    assert _mapped() == mapped


def test_memory_lives_as_long_as_somebody_maps_it() -> None:
    made = Segment.create(_PAGE)
    made.view[:4] = b"kept"
    mapped = MappedSegment(made.read_only_fd(), made.capacity)
    made.close()
    assert bytes(mapped.view[:4]) == b"kept"
    mapped.close()


def test_many_segments_leave_no_descriptor_and_no_mapping() -> None:
    before, mapped = open_files(), _mapped()
    for size in range(200):
        made = Segment.create(size * 100)
        MappedSegment(made.read_only_fd(), made.capacity).close()
        made.close()
    assert opened_since(before) == []
    assert _mapped() == mapped


def test_close_twice_closes_no_other_descriptor(segment: Segment) -> None:
    made = Segment.create(1)
    number = made.fd
    made.close()
    other = os.open("/dev/null", os.O_RDONLY)
    try:
        assert other == number, "the kernel gives the lowest free number"
        made.close()
        os.fstat(other)
    finally:
        os.close(other)


def test_close_gives_the_descriptor_back_while_somebody_holds_a_view() -> None:
    before, mapped = open_files(), _mapped()
    made = Segment.create(1)
    number = made.fd
    with memoryview(made.view) as held:
        made.close()
        with pytest.raises(OSError):
            os.fstat(number)
        assert held[0] == 0
    del made, held
    assert opened_since(before) == []
    assert _mapped() == mapped


@pytest.mark.parametrize("capacity", [0, -1, 1 << 62])
def test_a_descriptor_is_closed_when_it_cannot_be_mapped(segment: Segment, capacity: int) -> None:
    before = open_files()
    # 0 maps the whole file.
    with contextlib.suppress(OSError, ValueError, OverflowError):
        MappedSegment(segment.read_only_fd(), capacity).close()
    assert opened_since(before) == []


def test_ids_are_hard_to_guess() -> None:
    made = [Segment.create(1) for _ in range(50)]
    ids = {segment.id for segment in made}
    for segment in made:
        segment.close()
    assert len(ids) == 50
    assert all(len(name) >= 16 for name in ids)


def test_creating_leaves_the_interpreter_to_others() -> None:
    # The ticker would stand still for the whole 128 MiB, were the GIL held.
    done = _run(
        "import threading, time\n"
        "from weightsync.shm.segments import Segment\n"
        "ticks, stop = [], threading.Event()\n"
        "def tick():\n"
        "    while not stop.is_set():\n"
        "        ticks.append(time.monotonic())\n"
        "        time.sleep(0.001)\n"
        "thread = threading.Thread(target=tick)\n"
        "thread.start()\n"
        "time.sleep(0.05)\n"
        "ticks.clear()\n"
        "begin = time.monotonic()\n"
        "segment = Segment.create(512 << 20)\n"
        "took = time.monotonic() - begin\n"
        "count = len(ticks)\n"
        "stop.set()\n"
        "thread.join()\n"
        "segment.close()\n"
        "assert count > 5, (count, took)\n"
    )
    assert done.returncode == 0, done.stderr


def test_limits_are_the_hosts() -> None:
    assert resource.getpagesize() == segments._PAGE
