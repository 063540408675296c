"""A version as a durable folder that a new vLLM loads: safetensors, and what came beside those.

Which folders a server has made and nobody has changed: no others are removed. Each has a file that
says so. It names the folder's own inode and every file with size and time of its last change: a
copy, a folder under another name, one that was restored, and one that anybody has put something
into are their owner's, and stay.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync.process_limits import write_remedy
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, invalid, refuse

if TYPE_CHECKING:
    from weightsync_client.attach import Attached

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


#: What holds weights, or tells where they lie: the version's own take their place.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_CONFIG = "config.json"
#: Files of which each tokenizer has one; tokenizer_config.json alone is none.
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab*", "tekken.json", "*.tiktoken")


def write_checkpoint(
    client: Client,
    attached: Attached,
    version: int,
    target: Path,
    owner: FolderOwner,
    stop: threading.Event,
    others: Collection[str] = (),
) -> str:
    """Write a version; the folder appears whole, proved and durable, or not at all.

    Of the folders that this owner has made below the same one the oldest goes, where there are
    more than it keeps; never one that it has not made, or that somebody has changed.

    Return what a vLLM would miss in it, one sentence; "": nothing.

    Beside the weights it has the files of the engine's checkpoint, such as configuration and
    tokenizer; of one that is not on this host's disk only `config.json`.

    Args:
        client: Pulls the version.
        attached: Knows what the engine has loaded.
        version: Its number.
        target: The folder, which is not there.
        owner: Whose it is.
        stop: Set once nobody waits for it any more.
        others: What other engines of this host have loaded, as `attached.checkpoint`: it stays.

    Raises:
        ClientError: It cannot be written, the version cannot be pulled, or it was stopped.
    """
    work = work_folder(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(target.parent, owner)
        _make(work)
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        mark_folder(work, target, owner)
        _pull(client, version, work, stop)
        _copy_others(attached, work)
        missing = _missing(attached, work)
        mark_folder(work, target, owner)
        sync_folder(work)
        if target.exists():
            raise invalid(f"{target} already exists; name another folder")
        _check(stop)
        work.rename(target)
        sync_path(target.parent)
        _make_room(target, owner, {attached.checkpoint, *others})
        return missing
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unwritable(target: Path, error: OSError) -> ClientError:
    remedy = write_remedy(error, "the server's user")
    return refuse(
        Reason.DISK_EXHAUSTED, f"{target} cannot be written ({error.strerror or error}); {remedy}"
    )


def _make(work: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if any(work.iterdir()):
            raise invalid(
                f"remove {work}, which this server did not create, or name another folder",
            )
        work.rmdir()
    work.mkdir()


def _pull(client: Client, version: int, work: Path, stop: threading.Event) -> None:
    # Inside the folder that is known as ours, whatever a process that dies here leaves.
    weights = work / "weights"
    client.pull(weights, version, on_progress=lambda _done, _total: _check(stop))
    for file in weights.iterdir():
        file.rename(work / file.name)
    weights.rmdir()


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise refuse(
            Reason.CANCELLED,
            "request the checkpoint again: the caller disconnected before it was finished",
        )


def _make_room(target: Path, owner: FolderOwner, loaded: Collection[str]) -> None:
    found = [folder for name in loaded if (folder := _local(name)) is not None]
    try:
        remove_old(target.parent, owner, found)
    except OSError as error:
        # The new one is there and durable; the next one tries again.
        logger.warning("an old checkpoint below %s is not removed: %s", target.parent, error)


def _copy_others(attached: Attached, folder: Path) -> None:
    source = _local(attached.checkpoint)
    if source is not None:
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    config = folder / _CONFIG
    if not config.exists() and attached.config:
        config.write_text(json.dumps(dict(attached.config), indent=2))


def _missing(attached: Attached, folder: Path) -> str:
    names = [] if (folder / _CONFIG).exists() else [_CONFIG]
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        names.append("tokenizer")
    if not names:
        return ""
    return (
        f"copy {' and '.join(names)} into the folder before a vLLM loads it: none was found "
        f"beside the engine's checkpoint {attached.checkpoint}"
    )


def _local(checkpoint: str) -> Path | None:
    """Return the folder of what the engine has loaded; None: it is not on this disk."""
    path = Path(checkpoint)
    if path.is_dir():
        return path
    try:
        # vLLM's own, where that runs; nothing is loaded for it.
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(checkpoint, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
        return None
