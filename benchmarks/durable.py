"""What a push to a store on disk is held against: the same shards, written and flushed."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.source import Source

__all__ = ["filesystem", "write_shards"]

#: Of one write call.
_PIECE = 16 << 20


def write_shards(source: Source, folder: Path) -> None:
    """Write each shard to a new file and flush it, one after the other; then flush the folder."""
    for number, block in enumerate(source.blocks):
        _write(folder / f"{number}.safetensors", block.view)
    _flush(folder)


def _write(path: Path, view: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done : done + _PIECE])
        os.fsync(fd)
    finally:
        os.close(fd)


def _flush(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def filesystem(path: Path) -> str:
    """Return the type of the file system that holds a path, such as `ext4`."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, found, *_ = line.split()
        inside = path.resolve() == Path(place) or Path(place) in path.resolve().parents
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind
