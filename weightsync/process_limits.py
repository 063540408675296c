"""How much memory this process may still take, and what to do where it cannot write files."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

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


def file_limit_remedy() -> str:
    """Return what limits the size of files, RLIMIT_FSIZE or a file system, and how to raise it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "use another file system: this one does not allow files that large"
    return (
        "raise the file size limit (`ulimit -f`, or LimitFSIZE= in the unit): this process may "
        f"write {limit} bytes per file"
    )


def open_files_remedy(error: OSError) -> str:
    """Return how to raise the limit on descriptors that EMFILE or ENFILE is about."""
    if error.errno == errno.ENFILE:
        return "raise the limit on open files of the host (`sysctl fs.file-max`)"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        "raise the limit on open files (`ulimit -n`, or LimitNOFILE= in the unit): this process "
        f"may have {limit}"
    )


def memory_remedy(error: OSError, otherwise: str) -> str:
    """Return what to do when shared memory was refused: `otherwise`, unless a limit was met."""
    match error.errno:
        case errno.EFBIG:
            return file_limit_remedy()
        case errno.EMFILE | errno.ENFILE:
            return open_files_remedy(error)
        case _:
            return otherwise


def write_remedy(error: OSError, who: str = "this process") -> str:
    """Return what to do about a folder that cannot be written, by `who` for EACCES and its like."""
    match error.errno:
        case errno.EFBIG:
            return file_limit_remedy()
        case errno.ENOSPC | errno.EDQUOT:
            return "free space there, or name another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"let {who} write there, or name another folder"
        case _:
            return "name another folder"
