"""How much room there is where the server and vLLM write, asked of the disks again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weightsync.log_lines import event

logger = logging.getLogger(__name__)

#: Seconds between two questions to a disk, and questions that it may leave unanswered.
_EVERY_S, _MOST_UNANSWERED = 2.0, 10
#: A disk with less is full for whoever keeps a record there.
_LEAST_BYTES = 1 << 20


class DataFolder(NamedTuple):
    """A folder that somebody writes to; with no more than `floor_bytes` free it counts as full."""

    name: str
    path: Path
    floor_bytes: int = _LEAST_BYTES


@dataclass(frozen=True)
class DiskReading:
    """What the disk of a folder has said last: `free_bytes` for this user, `used_bytes` of all.

    `error` is why nothing more can be written there, with the remedy, or empty.
    """

    name: str
    path: str
    free_bytes: int = 0
    used_bytes: int = 0
    error: str = ""


def read_disk(folder: DataFolder) -> DiskReading:
    """Ask the disk of a folder; blocks for as long as that does not answer."""
    path = str(folder.path)
    try:
        found = os.statvfs(path)
    except OSError as refused:
        why = f"check the disk of {path}, which cannot be read: {refused.strerror}"
        return DiskReading(folder.name, path, error=why)
    free = found.f_bavail * found.f_frsize
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    error = ""
    if found.f_flag & os.ST_RDONLY:
        error = f"mount {path} writable: it is read-only"
    elif free <= folder.floor_bytes:
        error = (
            f"free space on the disk of {path}: {free} bytes are left, "
            f"and {folder.floor_bytes} of them are kept free"
        )
    elif found.f_files and not found.f_favail:
        error = (
            f"remove files from the disk of {path}: no more files can be created on it (no free "
            "inodes)"
        )
    return DiskReading(folder.name, path, free, used, error)


class DiskWatch:
    """Knows the last answer of each disk. One that hangs holds up nobody, and counts as full.

    `on_change` is called on the event loop with a folder's name and why it takes nothing more;
    empty: it does again.
    """

    def __init__(
        self, folders: Sequence[DataFolder], on_change: Callable[[str, str], object]
    ) -> None:
        self.folders = folders
        self._on_change = on_change
        self._stopped = threading.Event()
        self._last: dict[str, DiskReading] = {}
        # Counted, not timed: a server that stood still has heard nothing of a disk that is well.
        self._unanswered: dict[str, int] = {}
        self._errors: dict[str, str] = {}
        self._next: asyncio.TimerHandle

    def readings(self) -> list[DiskReading]:
        return [self.reading(folder.name) for folder in self.folders]

    def reading(self, name: str) -> DiskReading:
        last = self._last[name]
        unanswered = self._unanswered[name]
        if unanswered < _MOST_UNANSWERED:
            return last
        seconds = unanswered * _EVERY_S
        why = f"check the disk of {last.path}, which has not answered for {seconds:.0f} s"
        return DiskReading(last.name, last.path, last.free_bytes, last.used_bytes, why)

    def start(self) -> None:
        """Ask each disk once, and from now on a thread for each goes on asking."""
        loop = asyncio.get_running_loop()
        for folder in self.folders:
            self._take(read_disk(folder))
            # Not one of a pool, which would wait at the server's end for a disk that hangs.
            threading.Thread(
                target=self._ask, args=(folder, loop), name=f"disk {folder.name}", daemon=True
            ).start()
        self._tell()

    def stop(self) -> None:
        self._stopped.set()
        self._next.cancel()

    def _ask(self, folder: DataFolder, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.wait(_EVERY_S):
            reading = read_disk(folder)
            # The loop is closed where the server has ended meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._take, reading)

    def _take(self, reading: DiskReading) -> None:
        self._last[reading.name] = reading
        self._unanswered[reading.name] = 0

    def _tell(self) -> None:
        self._next = asyncio.get_running_loop().call_later(_EVERY_S, self._tell)
        for reading in self.readings():
            self._unanswered[reading.name] += 1
            if bool(reading.error) == bool(self._errors.get(reading.name)):
                continue
            self._errors[reading.name] = reading.error
            if reading.error:
                logger.warning(
                    "nothing more is written to %s: %s",
                    reading.name,
                    reading.error,
                    extra=event("disk.full", folder=reading.name),
                )
            else:
                logger.info(
                    "%s can be written again: %s",
                    reading.name,
                    reading.path,
                    extra=event("disk.writable", folder=reading.name),
                )
            self._on_change(reading.name, reading.error)
