"""Folders that are durable before anybody counts on them."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_folder", "sync_path"]


def sync_folder(folder: Path) -> None:
    """Make a folder, and every file and folder in it, durable.

    Raises:
        OSError: Nothing is known of it then.
    """
    for path, _, names in os.walk(folder):
        for name in names:
            file = Path(path, name)
            if file.is_file() and not file.is_symlink():
                sync_path(file)
        sync_path(Path(path))


def sync_path(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
