"""What a local store does when it is opened: leave only whole versions."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import MAX_VERSION
from weightsync_server.ops import durable_files
from weightsync_server.store.local.open_pushes import is_foreign, read_push
from weightsync_server.store.local.version_files import COMMIT, lengths, remove_unnamed
from weightsync_server.store.protocol import MODEL_NAME
from weightsync_server.store.store_records import (
    TEMPORARY,
    CommitRecord,
    based,
    read_document,
    write_document,
)

logger = logging.getLogger(__name__)

#: Without it nothing in a directory is ever removed: it may be somebody's own.
MARKER = "weightsync-store.json"

#: Seconds without a write after which another server's open push is nobody's: that server, or its
#: state, is gone. One that lives drops an idle push much sooner.
_ABANDONED_S = 86_400.0

_VERSION = re.compile(r"v([1-9][0-9]{0,15})")


def recover(root: Path, server: str = "") -> tuple[list[CommitRecord], list[str]]:
    """Make or check the store at `root`, remove leftovers, and return its whole versions.

    With them comes a sentence for each that has a record and is not whole. The open pushes of any
    server but `server` stay while they are touched. An OSError puts nothing aside: it may pass.
    REQUEST_INVALID: `root` is neither a store of ours nor empty.
    """
    _claim(root)
    records: list[CommitRecord] = []
    lost: list[str] = []
    for model in sorted(root.iterdir()):
        if not _is_plain_directory(model) or not MODEL_NAME.fullmatch(model.name):
            continue
        found = []
        for entry in model.iterdir():
            if _is_plain_directory(entry):
                try:
                    found += _recover_version(entry, server)
                except _LostError as error:
                    lost.append(str(error))
            elif entry.name.endswith(TEMPORARY):
                durable_files.unlink(entry)
        records += _based(model, sorted(found, key=lambda record: record.version), lost)
    return records, lost


def _based(model: Path, records: list[CommitRecord], lost: list[str]) -> list[CommitRecord]:
    """Return the versions that can be read; put aside a delta without its base."""
    good, others = based(records)
    for record in others:
        why = f"its base, version {record.base_version}, is missing or different"
        lost.append(str(_quarantine(model / f"v{record.version}", why)))
    return good


def _claim(root: Path) -> None:
    if not root.exists():
        root.mkdir(mode=0o750, parents=True, exist_ok=True)
        durable_files.flush_directory(root.parent)
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
            durable_files.unlink(entry)
        elif entry.name != "lost+found":
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{root} is not a WeightSync store, and not empty (it holds {entry.name!r}); name "
                "an empty or new directory",
            )


def _is_plain_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


class _LostError(Exception):
    """A version that was committed is not whole."""


def _recover_version(directory: Path, server: str) -> list[CommitRecord]:
    match = _VERSION.fullmatch(directory.name)
    if match is None or int(match[1]) > MAX_VERSION:
        return []
    failpoints.hit("store.recover")
    try:
        commit = read_document(directory / COMMIT)
    except FileNotFoundError:
        push = read_push(directory)
        if push is None or (is_foreign(push, server) and _untouched_s(directory) > _ABANDONED_S):
            logger.info("removing %s, the rest of a push that was never committed", directory)
            shutil.rmtree(directory)
        return []
    except ValueError as error:
        raise _quarantine(directory, f"the commit record: {error}") from error
    try:
        named = lengths(commit)
        record = _whole(directory, commit, int(match[1]), named)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise _quarantine(directory, str(error)) from error
    remove_unnamed(directory, named, partial=True)
    return [record]


def _untouched_s(directory: Path) -> float:
    return clock.wall() - max(path.stat().st_mtime for path in (directory, *directory.iterdir()))


def _whole(
    directory: Path, commit: dict[str, Any], version: int, named: dict[str, int]
) -> CommitRecord:
    record = CommitRecord.from_json(commit["record"])
    if (record.model, record.version) != (directory.parent.name, version):
        raise ValueError(f"the commit record is of version {record.version} of {record.model}")
    for name, length in named.items():
        found = (directory / name).lstat().st_size
        if found != length:
            raise ValueError(f"{name} has {found} bytes and should have {length}")
    return record


def _quarantine(directory: Path, why: str) -> _LostError:
    damaged = directory.with_name(f"damaged-{directory.name}-{secrets.token_hex(4)}")
    try:
        durable_files.rename(directory, damaged)
    except OSError as error:
        logger.error("version %s is damaged (%s) and cannot be moved: %s", directory, why, error)  # noqa: TRY400
    else:
        logger.error("version %s is damaged (%s): moved to %s", directory, why, damaged)
    return _LostError(f"{directory.parent.name}/{directory.name} is damaged ({why})")
