"""Members in a folder: files that their processes renew, by the clock that all of a host share.

The modification time of a file is the reading of the host's monotonic clock until which the member
counts: it is renewed in one step, and no change of the wall clock ends or revives anybody. The file
names the boot that this clock belongs to; what another boot left counts for nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread
from weightsync_server.register.membership import Renewal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FolderLease", "FolderMembers"]

#: A file whose member has been gone for so long is removed; seconds.
_KEPT_S = 60.0
#: The longest wait for a turn, and between two looks for it; seconds.
_TURN_S, _LOOK_S = 2.0, 0.01
#: Begins the name of a file that has not got its own yet; no key begins so.
_HIDDEN = "."


class FolderMembers:
    """Reads members; blocks.

    Args:
        folder: Where they are, and nothing else is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()

    def read(self, name: str) -> bytes | None:
        """Return a member's value; None: no such member is alive."""
        found = self._open(name)
        return found and found[1]

    def alive(self, start: str) -> dict[str, tuple[int, bytes]]:
        """Return inode and value of each living member, by the names that begin so."""
        found = {}
        for name in os.listdir(self.folder):  # noqa: PTH208 - names are what is wanted
            if name.startswith(start) and (member := self._open(name)):
                found[name] = member
        return found

    def lease(self, key: str, name: str, value: bytes, ttl_s: int) -> FolderLease:
        """Return what puts a member there and renews it."""
        return FolderLease(self, key, name, self._boot + value, ttl_s)

    @contextlib.contextmanager
    def nobody_comes(self) -> Iterator[None]:
        """Let nobody appear until the block ends; blocks.

        Raises:
            WeightSyncError: DEADLINE_EXCEEDED; whoever has the turn stands still.
        """
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            end = clock.monotonic() + _TURN_S
            while not _locked(fd):
                if clock.monotonic() >= end:
                    raise WeightSyncError(
                        Reason.DEADLINE_EXCEEDED,
                        f"another process has had its turn in {self.folder} for {_TURN_S:g} s; it "
                        "may be stopped: continue or end it (fuser names it)",
                    )
                threading.Event().wait(_LOOK_S)
            yield
        finally:
            os.close(fd)

    def _open(self, name: str) -> tuple[int, bytes] | None:
        try:
            with (self.folder / name).open("rb") as file:
                status, data = os.fstat(file.fileno()), file.read()
        except FileNotFoundError:
            return None
        ours = data.startswith(self._boot)
        left_s = status.st_mtime_ns / 1e9 - clock.monotonic()
        if ours and left_s > 0 and not name.startswith(_HIDDEN):
            return status.st_ino, data[len(self._boot) :]
        if not ours or left_s < -_KEPT_S:
            durable_files.unlink(self.folder / name)
        return None


class FolderLease:
    """One member's file, by a descriptor: what takes its name is never renewed in its stead."""

    def __init__(
        self, members: FolderMembers, key: str, name: str, data: bytes, ttl_s: int
    ) -> None:
        self.key = key
        self._members, self._name, self._data, self._ttl_s = members, name, data, ttl_s
        self._fd: int | None = None

    async def renew(self) -> Renewal:
        """Move its time on, or put it there where it is not."""
        with translate_os_errors(f"renewing {self.key}"):
            return Renewal(self._ttl_s, await in_thread(self._renew))

    async def release(self) -> None:
        """Remove it, unless another has taken its name."""
        with translate_os_errors(f"removing {self.key}"):
            await in_thread(self._release)

    def _renew(self) -> bool:
        """Return whether it was there as it was."""
        if self._fd is None:
            self._fd = self._place()
        elif (status := os.fstat(self._fd)).st_nlink:
            if status.st_mtime_ns / 1e9 <= clock.monotonic():
                # It was gone, and appears anew.
                with self._members.nobody_comes():
                    self._move_on(self._fd)
                return False
            self._move_on(self._fd)
            return status.st_mtime_ns / 1e9 > clock.monotonic()
        elif self._members.read(self._name) is None:
            # Swept away while this process was stopped.
            os.close(self._fd)
            self._fd = None
            self._fd = self._place()
        return False

    def _place(self) -> int:
        hidden = self._members.folder / f"{_HIDDEN}{secrets.token_hex(8)}"
        fd = durable_files.create_unnamed(self._members.folder)
        try:
            durable_files.write(fd, self._data)
            self._move_on(fd)
            # A link takes no name that is taken, and what has no name cannot be renamed.
            durable_files.link(fd, hidden)
            with self._members.nobody_comes():
                self._move_on(fd)
                durable_files.rename(hidden, self._members.folder / self._name)
        except BaseException:
            os.close(fd)
            durable_files.unlink(hidden)
            raise
        return fd

    def _move_on(self, fd: int) -> None:
        until = int((clock.monotonic() + self._ttl_s) * 1e9)
        os.utime(fd, ns=(until, until))

    def _release(self) -> None:
        if self._fd is None:
            return
        if os.fstat(self._fd).st_nlink:
            durable_files.unlink(self._members.folder / self._name)
        os.close(self._fd)
        self._fd = None


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
