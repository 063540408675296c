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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import unwritten, writers_are_seen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from typing import Any

    from weightsync.shm.segments import Segment

__all__ = ["LiveWriters"]


class _Holder(NamedTuple):
    """A process that was given memory.

    Attributes:
        pid: Of the process; 0: it is in a PID namespace that the server does not see.
        pidfd: Of it.
        always: Whether it can write at any time, and not in blocks only.
        job: Of which it is a process; "": its release names none; None: the server's told none.
    """

    pid: int
    pidfd: int
    always: bool
    job: str | None

    @property
    def lives(self) -> bool:
        """Whether the process has not ended, by the kernel's word."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


class LiveWriters:
    """Remembers to whom the memory of a rank was handed out; called by any thread.

    Args:
        segments: Returns those that the parameters lie in; none: they lie on a GPU.
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

        Args:
            args: `holder`, by which the segment socket has its pidfd, `pid`, `always`, and `job`,
                which servers of older releases do not tell.
            socket: The segment socket.

        Raises:
            LookupError: The server has withdrawn it.
        """
        with SegmentClient(socket) as client:
            ((pidfd, _),) = client.map([str(args["holder"])])
        pid, always = int(args["pid"]), bool(args.get("always"))
        job = str(args["job"]) if "job" in args else None
        with self._lock:
            self._reap()
            key = pid, 0 if pid else self._own_number(pidfd)
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
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def state(self) -> dict[str, Any]:
        """Tell who has the memory.

        `holders`: ids of the processes that live, 0 for each that has none here; `unguarded`:
        whether one of them can write at any time; `unguarded_by`: ids of those that can, each with
        its job, where that is known; `writing`: whether somebody can write in a block; `writers`:
        ids of those that do, as far as that is seen from here.
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
    """Return whether a process is seen to have one of these open, or mapped for writing."""
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
