"""Where the processes of a host meet, and where they keep state, when no setting says so.

Server, vLLM's plugins and the command line ask here, so they agree. Folders of a user follow the
XDG Base Directory Specification 0.8.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from weightsync.errors import WeightSyncError, invalid_request

__all__ = ["make_dir", "run_dir", "state_dir"]

_SYSTEM_RUN = Path("/run/weightsync")
_SYSTEM_STATE = Path("/var/lib/weightsync")
_TEMPORARY = Path("/tmp")  # noqa: S108 - a folder in it is taken only if this user owns it
_NAME = "weightsync"
#: What lets others write, or put a file of theirs in the place of one of ours.
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def run_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the sockets that a host's server, vLLM and trainers share.

    WEIGHTSYNC_RUN_DIR names it, from the current folder if it is relative. Else it is
    /run/weightsync for root, and for users who can write there, such as those of the systemd units
    and the images; else the user's own: $XDG_RUNTIME_DIR/weightsync, or /tmp/weightsync-UID.
    """
    env = os.environ if environment is None else environment
    if given := env.get("WEIGHTSYNC_RUN_DIR"):
        return Path(given).absolute()
    if _is_for_us(_SYSTEM_RUN):
        return _SYSTEM_RUN
    user = os.geteuid()
    # A shell without a login session lacks the variable, which must not lead it elsewhere.
    for folder in (Path(env.get("XDG_RUNTIME_DIR", "")), Path(f"/run/user/{user}")):
        if folder.is_absolute() and _is_own(folder):
            return folder / _NAME
    return _TEMPORARY / f"{_NAME}-{user}"


def state_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder in which a server keeps its versions and its journal.

    WEIGHTSYNC_STATE_DIR names it, from the current folder if it is relative. Else it is
    /var/lib/weightsync for root, and for users who can write there; else
    $XDG_STATE_HOME/weightsync, or ~/.local/state/weightsync. A user without a home folder gets
    /var/lib/weightsync, too.
    """
    env = os.environ if environment is None else environment
    if given := env.get("WEIGHTSYNC_STATE_DIR"):
        return Path(given).absolute()
    if _is_for_us(_SYSTEM_STATE):
        return _SYSTEM_STATE
    folder = Path(env.get("XDG_STATE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".local/state"
        except RuntimeError:
            return _SYSTEM_STATE
    return folder / _NAME


def make_dir(folder: Path, variable: str = "WEIGHTSYNC_RUN_DIR") -> None:
    """Make a folder of sockets or state, open to this user alone, unless it is there already.

    Args:
        folder: The folder; those that it lies in are made, too.
        variable: Names it in the environment; errors say so.

    Raises:
        WeightSyncError: REQUEST_INVALID if it cannot be made or written, or lies in /tmp and
            another user made it or can write there.
    """
    shared = folder in (_SYSTEM_RUN, _SYSTEM_STATE)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o755 if shared else 0o700, exist_ok=True)
    except OSError as error:
        raise _refused(variable, f"{folder} cannot be made ({error.strerror})") from error
    # Anyone can make a folder of this name before we do, where folders of users lie side by side.
    if folder.parent == _TEMPORARY and not _is_own(folder):
        raise invalid_request(
            f"remove {folder}, or set {variable} to a folder of your own: "
            f"{_owner(folder)} could replace the files in it"
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise _refused(variable, f"{folder} cannot be written by user {os.geteuid()}")


def _refused(variable: str, why: str) -> WeightSyncError:
    return invalid_request(f"set {variable} to a folder that you can write: {why}")


def _is_for_us(folder: Path) -> bool:
    writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK, effective_ids=True)
    return writable or os.geteuid() == 0


def _is_own(folder: Path) -> bool:
    """Return whether it is a folder in which this user alone, and root, can replace files."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & _OTHERS_WRITE
    return is_private and found.st_uid == os.geteuid()


def _owner(folder: Path) -> str:
    found = folder.lstat()
    if found.st_uid != os.geteuid():
        return f"user {found.st_uid}, who owns it,"
    return f"others, whom its mode {stat.S_IMODE(found.st_mode):04o} lets write there,"
