"""Who has the memory of a rank, and who can write it, by the kernel's word alone."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightsync.shm.attach_socket import LiveMapping, MemoryAccess
from weightsync.shm.live_writers import LiveWriters
from weightsync.shm.segment_socket import SegmentServer
from weightsync.shm.segments import Segment, map_at

if TYPE_CHECKING:
    from collections.abc import Iterator

_FDS = Path("/proc/self/fd")


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(mmap.PAGESIZE)
    yield made
    made.close()


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[SegmentServer]:
    made = SegmentServer(tmp_path / "s.sock")
    yield made
    made.close()


def _remember(writers: LiveWriters, socket: SegmentServer, pid: int, **how: Any) -> None:
    socket.publish("holder", os.pidfd_open(pid), 0)
    writers.remember({"holder": "holder", "pid": pid, **how}, str(socket.path))


def _remember_unseen(writers: LiveWriters, socket: SegmentServer, pid: int, **how: Any) -> None:
    """Remember a process as one of a PID namespace that the server does not see."""
    socket.publish("holder", os.pidfd_open(pid), 0)
    writers.remember({"holder": "holder", "pid": 0, **how}, str(socket.path))


def _tells_apart() -> bool:
    mine, parent = os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid())
    try:
        return os.fstat(mine).st_ino != os.fstat(parent).st_ino
    finally:
        os.close(mine)
        os.close(parent)


@contextlib.contextmanager
def _process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with _process() as process:
        yield process


def test_a_process_is_remembered_once_and_until_it_has_ended(
    segment: Segment, socket: SegmentServer, sleeper: subprocess.Popen[bytes]
) -> None:
    writers = LiveWriters(lambda: (segment,))
    open_before = len([*_FDS.iterdir()])
    for _ in range(150):
        _remember(writers, socket, sleeper.pid)
        _remember(writers, socket, os.getpid())
    # One for each process, and what the socket has.
    assert len([*_FDS.iterdir()]) < open_before + 50
    assert writers.state()["holders"] == sorted([sleeper.pid, os.getpid()])
    assert not writers.state()["unguarded"]
    sleeper.kill()
    sleeper.wait()
    assert writers.state()["holders"] == [os.getpid()]


def test_processes_that_have_no_pid_here_are_remembered_each(
    segment: Segment, socket: SegmentServer, sleeper: subprocess.Popen[bytes]
) -> None:
    """As those of a PID namespace that the server does not see."""
    writers = LiveWriters(lambda: (segment,))
    with _process() as other:
        for pid, job in ((other.pid, "a"), (sleeper.pid, "b")):
            _remember_unseen(writers, socket, pid, always=True, job=job)
        state = writers.state()
        assert state["holders"] == [0, 0]
        assert sorted(state["unguarded_by"]) == [[0, "a"], [0, "b"]]
        sleeper.kill()
        sleeper.wait()
        assert writers.state()["unguarded_by"] == [[0, "a"]]


@pytest.mark.skipif(
    not _tells_apart(), reason="this kernel does not tell processes by their pidfds"
)
def test_a_process_that_has_no_pid_here_is_remembered_once(
    segment: Segment, socket: SegmentServer, sleeper: subprocess.Popen[bytes]
) -> None:
    writers = LiveWriters(lambda: (segment,))
    open_before = len([*_FDS.iterdir()])
    _remember_unseen(writers, socket, sleeper.pid, always=True, job="a")
    for _ in range(100):
        _remember_unseen(writers, socket, sleeper.pid, always=False, job="a")
    assert len([*_FDS.iterdir()]) < open_before + 50
    assert writers.state()["holders"] == [0]
    assert writers.state()["unguarded_by"] == [[0, "a"]]


def test_where_the_kernel_tells_no_processes_apart_each_time_counts(
    segment: Segment,
    socket: SegmentServer,
    sleeper: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Linux before 6.9, all of whose pidfds are one inode: nobody who lives is forgotten."""
    writers = LiveWriters(lambda: (segment,))
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_dev=1, st_ino=2))
    with _process() as other:
        for pid in (sleeper.pid, other.pid):
            _remember_unseen(writers, socket, pid, job="a")
        monkeypatch.undo()
        assert writers.state()["holders"] == [0, 0]


def test_who_can_always_write_is_told(segment: Segment, socket: SegmentServer) -> None:
    writers = LiveWriters(lambda: (segment,))
    _remember(writers, socket, os.getpid(), always=True)
    _remember(writers, socket, os.getpid())
    fd = segment.lend()
    assert writers.state() == {
        "holders": [os.getpid()],
        "unguarded": True,
        "unguarded_by": [],
        "writing": False,
        "writers": [],
    }
    os.close(fd)


def test_the_job_of_who_can_always_write_is_told(
    segment: Segment, socket: SegmentServer, sleeper: subprocess.Popen[bytes]
) -> None:
    host, gpu = LiveWriters(lambda: (segment,)), LiveWriters(tuple)
    for writers in (host, gpu):
        _remember(writers, socket, sleeper.pid, job="a", always=True)
        # By a server of an older release, which has no word for it.
        _remember(writers, socket, sleeper.pid)
        _remember(writers, socket, os.getpid(), job="b")
    assert host.state()["unguarded_by"] == [[sleeper.pid, "a"]]
    assert sorted(gpu.state()["unguarded_by"]) == sorted([[sleeper.pid, "a"], [os.getpid(), "b"]])
    sleeper.kill()
    sleeper.wait()
    assert host.state()["unguarded_by"] == []
    assert gpu.state()["unguarded_by"] == [[os.getpid(), "b"]]


def test_memory_of_a_gpu_can_always_be_written_and_has_a_gate(socket: SegmentServer) -> None:
    writers = LiveWriters(tuple)
    _remember(writers, socket, os.getpid())
    assert writers.state()["unguarded"]
    assert not writers.state()["writing"]
    gate = writers.gate()
    another = os.dup(gate)
    os.close(gate)
    assert writers.state()["writing"]
    assert writers.state()["writers"] == [os.getpid()]
    os.close(another)
    assert not writers.state()["writing"]


def test_a_mapping_that_is_left_counts_whoever_has_it(
    segment: Segment, socket: SegmentServer
) -> None:
    writers = LiveWriters(lambda: (segment,))
    _remember(writers, socket, os.getpid())
    fd = segment.read_only_fd()
    mapping = LiveMapping(fd, segment.capacity)
    assert not writers.state()["writing"]
    written = segment.lend()
    mapping.put(written, MemoryAccess.WRITE)
    os.close(written)
    mapping.view[0] = 1
    assert segment.view[0] == 1
    assert writers.state()["writing"]
    for access in (MemoryAccess.COPY, MemoryAccess.READ):
        mapping.put(fd, access)
        assert not writers.state()["writing"]
        if access is MemoryAccess.COPY:
            mapping.view[0] = 2
            assert segment.view[0] == 1
    assert mapping.view[0] == 1
    os.close(fd)
    mapping.close()


def _left(segment: Segment) -> torch.Tensor:
    """Return a tensor that views a mapping which is closed."""
    fd = segment.read_only_fd()
    mapping = LiveMapping(fd, segment.capacity)
    os.close(fd)
    tensor = torch.frombuffer(mapping.view, dtype=torch.uint8)
    mapping.close()
    return tensor


def test_addresses_are_nobody_s_while_a_tensor_views_them(segment: Segment) -> None:
    tensor = _left(segment)
    address = tensor.data_ptr()
    assert _protection(address) == "---p"
    del tensor
    assert _protection(address) != "---p"


def test_a_child_keeps_addresses_of_its_parent_for_what_lies_there_now(segment: Segment) -> None:
    tensor = _left(segment)
    address = tensor.data_ptr()
    pid = os.fork()
    if not pid:
        # What the child maps next may come to lie there.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        map_at(address, mmap.PAGESIZE, mmap.PROT_READ, flags, -1)
        del tensor
        os._exit(0 if _protection(address) == "r--p" else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0


def _protection(address: int) -> str | None:
    """Return how the kernel lets this process use an address; None: nothing is mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, protection = line.split()[:2]
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= address < end:
            return protection
    return None


def test_what_cannot_be_mapped_leaves_all_as_it_was(segment: Segment) -> None:
    fd = segment.read_only_fd()
    mapping = LiveMapping(fd, segment.capacity)
    segment.view[0] = 3
    with pytest.raises(PermissionError):
        mapping.put(fd, MemoryAccess.WRITE)
    assert mapping.view[0] == 3
    os.close(fd)
    mapping.close()
