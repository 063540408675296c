"""Which processes have the memory of a segment open, as far as the kernel lets us see."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["holds"]

#: What links to descriptors of memfds begin with.
_MEMFD = "/memfd:"


def holds(pid: int, fd: int) -> bool:
    """Return whether a process is seen to have a memfd open or mapped; blocks.

    False also where its descriptors are not ours to see: of another user, of another namespace.
    No other file of the process is touched: one on a mount that hangs would keep us for ever.

    Args:
        pid: The process.
        fd: Our descriptor of the memfd.
    """
    ours = os.fstat(fd)
    process = Path(f"/proc/{pid}")
    try:
        return _is_open(process / "fd", ours) or _is_mapped(process / "maps", ours)
    except OSError:
        return False


def _is_open(folder: Path, ours: os.stat_result) -> bool:
    for descriptor in folder.iterdir():
        try:
            # What a link says the kernel knows by itself; a stat asks the file system of the file.
            is_memory = str(descriptor.readlink()).startswith(_MEMFD)
            if is_memory and os.path.samestat(descriptor.stat(), ours):
                return True
        except OSError:
            # Closed meanwhile.
            continue
    return False


def _is_mapped(maps: Path, ours: os.stat_result) -> bool:
    device = f"{os.major(ours.st_dev):02x}:{os.minor(ours.st_dev):02x}"
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    return any(line[3:5] == [device, str(ours.st_ino)] for line in fields)
