"""A folder of versions as a server sees it that does not own it: it reads, and changes nothing.

The owner may add, fold and remove versions meanwhile. What is gone when its turn comes is passed
over, and so is a record that cannot be read: the owner tells of damage.

A record shows as soon as it has its name, which a crash of the owner may still take back. So its
directory is flushed here before it is believed, and once: a record that changes is a new file.
"""

from __future__ import annotations

import errno
import logging
import re
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops import durable_files
from weightsync_server.store.documents import read_document
from weightsync_server.store.local.recovery import MARKER
from weightsync_server.store.local.version_files import COMMIT
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["FolderReader"]

logger = logging.getLogger(__name__)

_VERSION = re.compile(r"v([1-9][0-9]{0,15})")
#: What a file system says that has nothing to flush in a directory: its server does it in time.
_NOTHING_TO_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EROFS})


class FolderReader:
    """Reads the versions of one folder. It blocks; several threads may use it.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        #: What was read of each record that was there at the last look.
        self._read: dict[str, CommitRecord | None] = {}

    def stamps(self, model: str) -> frozenset[str]:
        """Return names that change whenever a version comes, goes or is kept in another form.

        Raises:
            OSError: The folder cannot be read.
            WeightSyncError: FAULT; it is no store, or not yet.
        """
        return frozenset(stamp for stamp, _ in self._stamped(model))

    def versions(self, model: str) -> list[CommitRecord]:
        """Return the committed versions of a model, by number; all of them survive a crash.

        Raises:
            OSError: The folder cannot be read, or not flushed.
            WeightSyncError: FAULT; it is no store, or not yet.
        """
        read: dict[str, CommitRecord | None] = {}
        for stamp, directory in self._stamped(model):
            if stamp in self._read:
                read[stamp] = self._read[stamp]
                continue
            try:
                record = _record(directory)
                # Afterwards: then what was read is what lasts.
                _flush(directory)
            except FileNotFoundError:
                continue
            read[stamp] = record
        self._read = read
        found = (record for record in read.values() if record is not None)
        return sorted(found, key=lambda record: record.version)

    def _stamped(self, model: str) -> Iterator[tuple[str, Path]]:
        for directory in _directories(self._root, model):
            try:
                status = (directory / COMMIT).stat()
            except FileNotFoundError:
                continue
            # Each write of a record makes a new file.
            yield f"{model}/{directory.name}-{status.st_ino}-{status.st_mtime_ns}", directory


def _flush(directory: Path) -> None:
    try:
        durable_files.flush_directory(directory)
    except OSError as error:
        if error.errno not in _NOTHING_TO_FLUSH:
            raise


def _record(directory: Path) -> CommitRecord | None:
    try:
        record = CommitRecord.from_json(read_document(directory / COMMIT)["record"])
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is passed over: its commit record is damaged (%s)", directory, error)
        return None
    same = (record.model, f"v{record.version}") == (directory.parent.name, directory.name)
    return record if same else None


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
