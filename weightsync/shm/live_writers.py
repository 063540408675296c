"""Which other processes have the live memory of this one, and which can write it now.

A rank outlives the servers that hand its memory on, so it is the rank that remembers to whom, and
it believes the kernel alone:

- a process that was given the memory is known by a pidfd, until it has ended;
- memory of the host is handed out for reading, and for writing during a block only: the kernel
  tells whether anybody, whoever gave it to them, still has such a descriptor or a mapping of one;
- memory of a GPU cannot be taken back. Whoever writes has a gate open meanwhile, a descriptor that
  is locked: while one duplicate of it is open anywhere, somebody is in a block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

from weightsync.shm.live_views import GATE, MEMORY
from weightsync.shm.segment_socket import OfferedFile, SegmentClient
from weightsync.shm.segments import Segment, unwritten, writers_are_seen


class _Holder(NamedTuple):
    """A process that was given memory, to write `always` or in blocks only.

    `pid` is 0 in a PID namespace that the server does not see. `job` is "" if its release names
    none, None if the server's release sends none.
    """

    pid: int
    pidfd: int
    always: bool
    job: str | None

    @property
    def lives(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


class LiveWriters:
    """Remembers to whom the memory of a rank was handed out; any thread may call.

    `segments` returns those of the parameters; none on a GPU.
    """

    def __init__(self, segments: Callable[[], Sequence[Segment]]) -> None:
        self._segments = segments
        self._lock = threading.Lock()
        # By their pid, or what else tells them apart.
        self._holders: dict[tuple[int, int], _Holder] = {}
        self._unnamed = 0
        self._gate = -1
        self._seen: bool | None = None

    def remember(self, args: Mapping[str, Any], socket: str) -> None:
        """Take note of a process before it is given anything.

        `args` has `holder`, the name of its pidfd at the segment socket, `pid`, `always`, and
        `job`, which older servers do not send. Raises LookupError if the server withdrew it.
        """
        with SegmentClient(socket) as client:
            ((pidfd, _),) = client.map([str(args["holder"])])
        pid, always = int(args["pid"]), bool(args.get("always"))
        job = str(args["job"]) if "job" in args else None
        with self._lock:
            self._reap()
            try:
                key = pid, 0 if pid else self._own_number(pidfd)
            except OSError:
                os.close(pidfd)
                raise
            before = self._holders.pop(key, None)
            if before is not None:
                # It lives, so it is the same process.
                os.close(before.pidfd)
                always = always or before.always
                job = before.job if job is None else job
            self._holders[key] = _Holder(pid, pidfd, always, job)

    def gate(self) -> int:
        """Return a descriptor that is open where somebody is in a block; the caller closes it."""
        with self._lock:
            if self._gate < 0:
                self._gate = os.memfd_create("weightsync-gate", os.MFD_CLOEXEC)
            fd = os.open(f"/proc/self/fd/{self._gate}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError:
            os.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def files(self, *, writable: bool) -> Iterator[Sequence[OfferedFile]]:
        """Lend what opens the segments."""
        with contextlib.ExitStack() as stack:
            files: list[OfferedFile] = []
            for segment in self._segments():
                # Opened anew: the kernel then knows who may still write.
                fd = segment.lend() if writable else segment.read_only_fd()
                stack.callback(os.close, fd)
                files.append((MEMORY, segment.capacity, fd))
            yield files

    def open_block(self, socket: str, offer: str) -> None:
        """Send what the memory is written with in one block, and no longer."""
        gate = self.gate()
        try:
            with self.files(writable=True) as files, SegmentClient(socket) as client:
                client.offer(offer, [(GATE, 0, gate), *files])
        finally:
            os.close(gate)

    def state(self) -> dict[str, Any]:
        """Tell who has the memory.

        `holders` are ids of living processes, 0 for each that has none here. `unguarded` tells
        whether one of them can write at any time, and `unguarded_by` which, with their jobs where
        known. `writing` tells whether somebody can write in a block, and `writers` who does, as far
        as that is seen from here.
        """
        with self._lock:
            self._reap()
            holders = sorted(holder.pid for holder in self._holders.values())
            segments = self._segments()
            free = any(holder.always for holder in self._holders.values())
            seen = self._sees_writers() if segments else False
            # Whoever may always write makes the kernel's answer for all others the same.
            mapped = seen and not free and not all(unwritten(each.fd) for each in segments)
            writing = mapped or self._gate_is_open()
            return {
                "holders": holders,
                "unguarded": free or (bool(holders) and not seen),
                "unguarded_by": [
                    [holder.pid, holder.job]
                    for _, holder in sorted(self._holders.items())
                    if holder.job is not None and (holder.always or not seen)
                ],
                "writing": writing,
                "writers": self._writers(segments) if writing else [],
            }

    def _writers(self, segments: Sequence[Segment]) -> list[int]:
        inodes = {os.fstat(segment.fd).st_ino for segment in segments}
        if self._gate >= 0:
            inodes.add(os.fstat(self._gate).st_ino)
        return [pid for pid, _ in sorted(self._holders) if pid and _may_write(pid, inodes)]

    def _own_number(self, pidfd: int) -> int:
        """Return a number that a process which has no pid here has alone."""
        own = os.pidfd_open(os.getpid())
        try:
            mine, its = (os.fstat(fd) for fd in (own, pidfd))
        finally:
            os.close(own)
        if (mine.st_dev, mine.st_ino) != (its.st_dev, its.st_ino):
            # A process has one inode, by whatever pidfd it is known.
            return its.st_ino
        # Before Linux 6.9 all have the same: rather one too many than one that is forgotten.
        self._unnamed -= 1
        return self._unnamed

    def _sees_writers(self) -> bool:
        if self._seen is None:
            self._seen = writers_are_seen()
        return self._seen

    def _gate_is_open(self) -> bool:
        if self._gate < 0:
            return False
        fd = os.open(f"/proc/self/fd/{self._gate}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            # With it goes the lock.
            os.close(fd)
        return False

    def _reap(self) -> None:
        for key, holder in list(self._holders.items()):
            if not holder.lives:
                os.close(holder.pidfd)
                del self._holders[key]


def _may_write(pid: int, inodes: AbstractSet[int]) -> bool:
    """Whether a process is seen to have one of these open, or mapped for writing."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            _, rights, _, _, inode, *_ = line.split()
            if "w" in rights and "s" in rights and int(inode) in inodes:
                return True
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                # Of memory that is open for reading only nothing is said.
                if fd.lstat().st_mode & stat.S_IWUSR and fd.stat().st_ino in inodes:
                    return True
    return False
