"""Which folders of checkpoints a server has made and nobody has changed: no others are removed.

Each has a file that says so. It names the folder's own inode and every file with size and time of
its last change: a copy, a folder under another name, one that was restored, and one that anybody
has put something into are their owner's, and stay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["MARK", "FolderOwner", "mark_folder", "remove_old", "remove_unfinished", "work_folder"]

logger = logging.getLogger(__name__)

MARK = ".weightsync-checkpoint.json"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class FolderOwner:
    """Who makes folders, and how many stay.

    Attributes:
        identity: Of the server.
        keep: How many of its folders stay, the new one included; 0: all.
    """

    identity: str
    keep: int


def work_folder(target: Path) -> Path:
    """Return where a folder is made, and removed."""
    return target.with_name(f".{target.name}.new")


def mark_folder(folder: Path, target: Path, owner: FolderOwner) -> None:
    """Say that a folder is ours, as it is now.

    Args:
        folder: The folder.
        target: The name that it will have.
        owner: Whose it is.

    Raises:
        OSError: It cannot be written.
    """
    document = {
        "owner": owner.identity,
        "name": target.name,
        "inode": folder.stat().st_ino,
        "made_ns": time.time_ns(),
        "files": _files(folder),
    }
    (folder / MARK).write_text(json.dumps(document))


def remove_unfinished(root: Path, owner: FolderOwner) -> None:
    """Remove what a process that died has left half made, or half removed.

    Raises:
        OSError: It cannot be removed.
    """
    for folder, mark in _marked(root, owner):
        if folder.name != mark["name"]:
            _erase(folder)


def remove_old(root: Path, owner: FolderOwner, loaded: Collection[Path]) -> None:
    """Remove the oldest of the folders beyond those that stay.

    Args:
        root: The folder of all of them.
        owner: Whose are removed.
        loaded: What engines have loaded, and load when they start again: it stays and counts for
            nobody.

    Raises:
        OSError: One cannot be removed.
    """
    if not owner.keep:
        return
    in_use = {folder.resolve() for folder in loaded}
    ours = [
        (int(mark["made_ns"]), folder)
        for folder, mark in _marked(root, owner)
        if folder.name == mark["name"] and _files(folder) == mark["files"]
        if folder.resolve() not in in_use
    ]
    for _, folder in sorted(ours)[: -owner.keep]:
        work = work_folder(folder)
        folder.rename(work)
        _erase(work)
        logger.info("removed the checkpoint %s: %d newer ones are kept", folder, owner.keep)


def _marked(root: Path, owner: FolderOwner) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in sorted(root.iterdir()):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            continue
        mark = _mark_of(folder)
        ours = mark.get("owner"), mark.get("inode")
        names = mark.get("name"), f".{mark.get('name')}.new"
        if ours == (owner.identity, found.st_ino) and folder.name in names:
            yield folder, mark


def _mark_of(folder: Path) -> dict[str, Any]:
    """Return what the mark says; empty: there is none, or it is none of ours."""
    try:
        fd = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            mark = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    right = isinstance(mark, dict) and isinstance(mark.get("made_ns"), int)
    return mark if right else {}


def _files(folder: Path) -> dict[str, list[int]]:
    """Return size and time of everything in a folder but its mark; of what is no file neither."""
    found: dict[str, list[int]] = {}
    for path in folder.iterdir():
        if path.name != MARK:
            facts = path.lstat()
            plain = stat.S_ISREG(facts.st_mode)
            found[path.name] = [facts.st_size, facts.st_mtime_ns] if plain else []
    return found


def _erase(folder: Path) -> None:
    # The mark at last: what is left of a removal that was cut short is known as ours.
    for path in folder.iterdir():
        if path.name == MARK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    with contextlib.suppress(FileNotFoundError):
        (folder / MARK).unlink()
    folder.rmdir()
