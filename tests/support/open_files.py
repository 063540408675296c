"""What a process of tests has open, where other tests may close what is theirs at any time."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

__all__ = ["open_files", "opened_since"]


def open_files() -> Counter[tuple[str, int, int]]:
    """Return what descriptors are of (name, device, inode), and how many are."""
    found: Counter[tuple[str, int, int]] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            status = entry.stat()
            found[str(entry.readlink()), status.st_dev, status.st_ino] += 1
    return found


def opened_since(before: Counter[tuple[str, int, int]]) -> list[str]:
    """Return the names of what is open and was not; what was closed meanwhile is no matter."""
    return [name for name, _, _ in (open_files() - before).elements()]
