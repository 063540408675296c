"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def _meminfo() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _own_cgroup() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:].strip("/")
    return ""


def _cgroup_free(folder: Path) -> int:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        used = int((folder / "memory.current").read_text())
        # Cached file pages count as used but give way; shared memory is not among them.
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 1 << 62


def available_bytes(cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Return the bytes that the host and every cgroup (version 2) around this process can give."""
    free = _meminfo()
    folder = cgroup_root / _own_cgroup()
    while folder.is_relative_to(cgroup_root):
        free = min(free, _cgroup_free(folder))
        folder = folder.parent
    return free
