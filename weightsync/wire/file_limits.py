"""What to do about files that cannot be written: EFBIG, no space, no right to."""

from __future__ import annotations

import errno
import resource

__all__ = ["file_limit_remedy", "write_remedy"]


def file_limit_remedy() -> str:
    """Return what limits the size of files here, and how to raise that.

    An administrator limits it (RLIMIT_FSIZE), else the file system does.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return "use another file system: this one does not allow files that large"
    return (
        "raise the file size limit (`ulimit -f`, or LimitFSIZE= in the unit): this process may "
        f"write {limit} bytes per file"
    )


def write_remedy(error: OSError, who: str = "this process") -> str:
    """Return what to do about a folder that cannot be written.

    Args:
        error: Why not.
        who: May not write there, for EACCES and its like.
    """
    match error.errno:
        case errno.EFBIG:
            return file_limit_remedy()
        case errno.ENOSPC | errno.EDQUOT:
            return "free space there, or name another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"let {who} write there, or name another folder"
        case _:
            return "name another folder"
