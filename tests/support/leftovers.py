"""Finds processes that a program has left behind, wherever they have moved in the process tree."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path

__all__ = ["Mark"]

_NAME = "WEIGHTSYNC_TEST_MARK"


class Mark:
    """An environment variable that every descendant inherits."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        self.variables = {_NAME: self._value}

    def alive(self) -> list[str]:
        """Return the command lines of all living processes that carry the mark."""
        needle = f"{_NAME}={self._value}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # A zombie has no environment any more and is its parent's to reap.
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{folder.name}: {command.decode(errors='replace')}")
        return found

    def left_after(self, seconds: float) -> list[str]:
        """Return what is still alive after at most so long."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left
