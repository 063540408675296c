"""What the kernel says of a process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["descriptors", "names", "state"]


def descriptors(pid: int | str = "self") -> int:
    """Return the number of open descriptors, one of which belongs to the question."""
    return len(_list(f"/proc/{pid}/fd"))


def names(directory: Path) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(_list(directory))


def state(pid: int) -> str:
    """Return the state of a process as in proc(5), such as `T`; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _list(path: Path | str) -> list[str]:
    return os.listdir(path)  # noqa: PTH208 - names are what is wanted
