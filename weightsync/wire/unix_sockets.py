"""Unix sockets to listen on: a path is taken over from the dead alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["claimed", "umask"]

#: sun_path of unix(7), less its final zero.
_MAX_PATH = 107
#: Seconds to wait for others that claim a path in the same folder, which takes milliseconds.
_TURN_S = 5.0
#: Between two tries, seconds.
_AGAIN_S = 0.01


@contextlib.contextmanager
def claimed(path: str | Path, remedy: str) -> Iterator[None]:
    """Within the block `path` is free, and nobody else claims it: bind and listen there.

    A socket that nobody listens on any more is removed. Whatever else is there stays as it is.

    Args:
        path: Of the socket.
        remedy: What else one can do than free the path, such as "choose another with --listen".

    Raises:
        WeightSyncError: REQUEST_INVALID; somebody listens there, it is no socket, or none can be
            made.
    """
    path = Path(path)
    if len(os.fsencode(path)) > _MAX_PATH:
        raise _refused(
            f"{path} has more than the {_MAX_PATH} bytes of a unix socket; shorten it", remedy
        )
    try:
        # The lock is the folder's own: nothing is left behind, and it ends with its holder.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = f"no unix socket can be made at {path} ({error.strerror}); make its folder"
        raise _refused(what, remedy) from error
    try:
        _wait_turn(folder, path, remedy)
        _free(path, remedy)
        yield
    finally:
        os.close(folder)


def _wait_turn(folder: int, path: Path, remedy: str) -> None:
    end = clock.monotonic() + _TURN_S
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if clock.monotonic() > end:
                what = f"another process keeps the folder of {path} locked; stop it"
                raise _refused(what, remedy) from None
            threading.Event().wait(_AGAIN_S)


def _free(path: Path, remedy: str) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _refused(f"{path} is no socket; remove it", remedy)
    if _is_live(path):
        raise _refused(f"another process listens on {path}; stop it", remedy)
    path.unlink(missing_ok=True)


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A listener whose queue is full would keep us waiting.
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # A full queue, no right to connect, another kind of socket: somebody's in any case.
            return True
    return True


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    """Make files within the block without these permissions, in every thread of the process.

    A socket so made is closed to others from its first moment on, which a chmod afterwards cannot
    promise once it listens.
    """
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def _refused(what: str, remedy: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, f"{what} or {remedy}")
