"""What a local store does when it is opened: leave only whole versions."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from typing import TYPE_CHECKING, Any

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server import files
from weightsync_server.store.base import MAX_VERSION, CommitRecord, check_model
from weightsync_server.store.files import TEMPORARY, read_document, write_document
from weightsync_server.store.partial import is_partial, read_push

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COMMIT", "MANIFEST", "MARKER", "recover", "shard_name"]

logger = logging.getLogger(__name__)

COMMIT = "commit.json"
MANIFEST = "manifest.json"
#: Without it nothing in a directory is ever removed: it may be somebody's own.
MARKER = "weightsync-store.json"

_VERSION = re.compile(r"v([1-9][0-9]{0,15})")


def shard_name(shard: int) -> str:
    """Return the file name of a shard.

    Raises:
        WeightSyncError: REQUEST_INVALID for a negative index.
    """
    if type(shard) is not int or shard < 0:
        raise WeightSyncError(Reason.REQUEST_INVALID, f"shard {shard!r} is no index")
    return f"{shard}.safetensors"


def recover(root: Path) -> tuple[list[CommitRecord], list[str]]:
    """Make or check the store at `root`; leftovers are removed.

    Returns:
        Its whole versions, and a sentence for each that has a record and is not whole.

    Raises:
        OSError: The directory cannot be used. Nothing is put aside for that: it may pass.
        WeightSyncError: REQUEST_INVALID when it is not a store of ours and not empty.
    """
    _claim(root)
    records: list[CommitRecord] = []
    lost: list[str] = []
    for model in sorted(root.iterdir()):
        if not _is_plain_directory(model) or not _is_model(model.name):
            continue
        for entry in model.iterdir():
            if _is_plain_directory(entry):
                try:
                    records += _recover_version(entry)
                except _LostError as error:
                    lost.append(str(error))
            elif entry.name.endswith(TEMPORARY):
                files.unlink(entry)
    return sorted(records, key=lambda record: (record.model, record.version)), lost


def _claim(root: Path) -> None:
    if not root.exists():
        root.mkdir(mode=0o750, parents=True, exist_ok=True)
        files.flush_directory(root.parent)
    try:
        known = read_document(root / MARKER).get("format")
    except FileNotFoundError:
        _refuse_foreign(root)
        write_document(root / MARKER, {"format": 1})
        known = 1
    except ValueError:
        known = None
    if known != 1:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"{root / MARKER} has format {known!r}: it is damaged, or of a newer release of this "
            "server; use that release",
        )


def _refuse_foreign(root: Path) -> None:
    for entry in root.iterdir():
        if entry.name.startswith(MARKER):  # left by a crash while it was written
            files.unlink(entry)
        elif entry.name != "lost+found":
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{root} is no WeightSync store and not empty (it holds {entry.name!r}); name an "
                "empty or new directory",
            )


def _is_plain_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_model(name: str) -> bool:
    try:
        check_model(name)
    except WeightSyncError:
        return False
    return True


class _LostError(Exception):
    """A version that was committed is not whole."""


def _recover_version(directory: Path) -> list[CommitRecord]:
    match = _VERSION.fullmatch(directory.name)
    if match is None or int(match[1]) > MAX_VERSION:
        return []
    failpoints.hit("store.recover")
    try:
        commit = read_document(directory / COMMIT)
    except FileNotFoundError:
        if read_push(directory) is None:
            logger.info("removing %s: it was never committed", directory)
            shutil.rmtree(directory)
        return []
    except ValueError as error:
        raise _put_aside(directory, f"the commit record: {error}") from error
    try:
        record = _whole(directory, commit, int(match[1]))
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise _put_aside(directory, str(error)) from error
    for entry in directory.iterdir():
        if entry.name.endswith(TEMPORARY) or is_partial(entry):
            files.unlink(entry)
    return [record]


def _whole(directory: Path, commit: dict[str, Any], version: int) -> CommitRecord:
    record = CommitRecord.from_json(commit["record"])
    if (record.model, record.version) != (directory.parent.name, version):
        raise ValueError(f"the commit record is of version {record.version} of {record.model}")
    lengths = {shard_name(index): size for index, size in enumerate(commit["shard_bytes"])}
    lengths[MANIFEST] = commit["manifest_bytes"]
    for name, length in lengths.items():
        found = (directory / name).lstat().st_size
        if found != length:
            raise ValueError(f"{name} has {found} bytes and should have {length}")
    return record


def _put_aside(directory: Path, why: str) -> _LostError:
    aside = directory.with_name(f"damaged-{directory.name}-{secrets.token_hex(4)}")
    try:
        files.rename(directory, aside)
    except OSError as error:
        logger.error("version %s is damaged (%s) and cannot be moved: %s", directory, why, error)  # noqa: TRY400
    else:
        logger.error("version %s is damaged (%s): moved to %s", directory, why, aside)
    return _LostError(f"{directory.parent.name}/{directory.name} is damaged ({why})")
