"""A folder of versions as a server sees it that does not own it: it reads, and changes nothing.

The owner may add, fold and remove versions meanwhile. What is gone when its turn comes is passed
over, and so is a record that cannot be read: the owner tells of damage.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.documents import read_document
from weightsync_server.store.local.recovery import MARKER
from weightsync_server.store.local.version_files import COMMIT
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["committed_versions", "version_stamps"]

logger = logging.getLogger(__name__)

_VERSION = re.compile(r"v([1-9][0-9]{0,15})")


def version_stamps(root: Path, model: str) -> frozenset[str]:
    """Return names that change whenever a version comes, goes or is kept in another form.

    Raises:
        OSError: The folder cannot be read.
        WeightSyncError: FAULT; it is no store, or not yet.
    """
    found = set()
    for directory in _directories(root, model):
        try:
            status = (directory / COMMIT).stat()
        except FileNotFoundError:
            continue
        # Each write of a record makes a new file.
        found.add(f"{directory.name}-{status.st_ino}-{status.st_mtime_ns}")
    return frozenset(found)


def committed_versions(root: Path, model: str) -> list[CommitRecord]:
    """Return the committed versions of a model, by number.

    Raises:
        OSError: The folder cannot be read.
        WeightSyncError: FAULT; it is no store, or not yet.
    """
    records = []
    for directory in _directories(root, model):
        try:
            record = CommitRecord.from_json(read_document(directory / COMMIT)["record"])
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is passed over: its commit record is damaged (%s)", directory, error)
            continue
        if (record.model, f"v{record.version}") == (model, directory.name):
            records.append(record)
    return sorted(records, key=lambda record: record.version)


def _directories(root: Path, model: str) -> Iterator[Path]:
    if not (root / MARKER).exists():
        raise WeightSyncError(
            Reason.FAULT,
            f"{root} is no store of versions; name the store of the server that takes the pushes, "
            "as this host mounts it",
        )
    try:
        entries = sorted((root / model).iterdir())
    except FileNotFoundError:
        return
    yield from (entry for entry in entries if _VERSION.fullmatch(entry.name))
