"""Disks that fail or forget: they take the place of `weightsync_server.ops.durable_files`."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

__all__ = ["FailingDisk", "ForgetfulDisk", "PowerLossError"]

#: Every function of the seam that may fail.
STEPS = (
    "create",
    "open_written",
    "append",
    "write",
    "pwrite",
    "allocate",
    "fsync",
    "rename",
    "unlink",
    "flush_directory",
)


class PowerLossError(BaseException):
    """No code of ours runs after it: not even a handler of every Exception."""


@dataclass
class FailingDisk:
    """Fails the Nth step, once or from then on.

    Attributes:
        nth: The step, from 1.
        error: What to raise.
        steps: Names of the functions that count.
        for_ever: Every later step fails too.
        calls: Steps so far.
    """

    nth: int
    error: BaseException
    steps: tuple[str, ...] = STEPS
    for_ever: bool = False
    calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in self.steps:
            patch.setattr(durable_files, name, self._counted(getattr(durable_files, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            with self._lock:
                self.calls += 1
                due = self.calls == self.nth or (self.for_ever and self.calls > self.nth)
            if due:
                raise type(self.error)(*self.error.args)
            return real(*args, **options)

        return counted


class ForgetfulDisk:
    """Knows what of a directory is durable: bytes that were flushed, under names that were.

    Args:
        root: The directory; what it holds now is durable.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        #: Bytes by inode, and names to inodes by the inode of the directory.
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._kept: list[int] = []
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                self._bytes[path.stat().st_ino] = path.read_bytes()
            self._flushed(Path(folder))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        fsync, flush_directory = durable_files.fsync, durable_files.flush_directory

        def synced(fd: int) -> None:
            fsync(fd)
            with self._lock:
                self._bytes[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()
                # An inode whose number is used again would look durable.
                self._kept.append(os.dup(fd))

        def flushed(path: Path | str) -> None:
            flush_directory(path)
            with self._lock:
                self._flushed(Path(path))

        patch.setattr(durable_files, "fsync", synced)
        patch.setattr(durable_files, "flush_directory", flushed)

    def _flushed(self, folder: Path) -> None:
        entries = {path.name: path.stat().st_ino for path in folder.iterdir()}
        self._names[folder.stat().st_ino] = entries
        for path in folder.iterdir():
            if path.is_dir():
                self._names.setdefault(path.stat().st_ino, {})
            else:
                self._bytes.setdefault(path.stat().st_ino, b"")
            self._kept.append(os.open(path, os.O_RDONLY))

    def lose_power(self) -> None:
        """Leave in the directory only what is durable."""
        inode = self._root.stat().st_ino
        for path in self._root.iterdir():
            if stat.S_ISDIR(path.stat().st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()
        self._restore(self._root, inode)

    def _restore(self, folder: Path, inode: int) -> None:
        for name, child in self._names.get(inode, {}).items():
            if child in self._names:
                (folder / name).mkdir()
                self._restore(folder / name, child)
            else:
                (folder / name).write_bytes(self._bytes.get(child, b""))

    def close(self) -> None:
        """Let go of the inodes."""
        for fd in self._kept:
            os.close(fd)
        self._kept.clear()
