"""The states of optimizers, each in a folder that is named after the version that it goes with.

The trainer writes one under a temporary name and makes it durable; here it gets its name in one
step, and goes when its version has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
from functools import partial
from typing import TYPE_CHECKING

from weightsync_server.ops import durable_files as files
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from pathlib import Path

    from weightsync_server.catalog.table import VersionTable

__all__ = ["StateFolders"]

logger = logging.getLogger(__name__)

_KEPT = re.compile(r"(\d+)-([0-9a-z]+)")
_NEW = "new-"


class StateFolders:
    """Knows which versions have a state of the optimizer.

    Args:
        root: The folder of all of them; its parent is there.
        table: The versions there are.

    Attributes:
        root: As given.
    """

    def __init__(self, root: Path, table: VersionTable) -> None:
        self.root = root
        self._table = table
        self._keeping: set[asyncio.Task[None]] = set()
        # Whoever removes what is of no use knows of every version that has a folder.
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Make the folder, and remove what is of no use, such as what was never finished.

        Raises:
            WeightSyncError: It cannot be written.
        """
        with translate_os_errors("opening the folder of the trainer's states"):
            await in_thread(partial(self.root.mkdir, 0o750, exist_ok=True))
            await self._prune(begin=True)

    def find(self, version: int) -> Path | None:
        """Return the folder of a version; None: it has none."""
        record = self._table.find(version)
        if record is None or not record.content_digest:
            return None
        folder = self.root / f"{version}-{record.content_digest}"
        return folder if folder.is_dir() else None

    @property
    def saving(self) -> str:
        """Path before the number of a version at which the trainer writes what `keep` takes up."""
        return str(self.root / _NEW)

    def keep(self, version: int) -> None:
        """Take up what the trainer has written and made durable, in the background."""
        task = asyncio.create_task(self._keep(version), name=f"trainer state {version}")
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def settle(self) -> None:
        """Wait until everything was taken up."""
        while self._keeping:
            await asyncio.wait(self._keeping)

    async def _keep(self, version: int) -> None:
        async with self._lock:
            try:
                record = self._table.find(version)
                if record is not None and record.content_digest:
                    target = self.root / f"{version}-{record.content_digest}"
                    await in_thread(_rename, self.root / f"{_NEW}{version}", target)
                await self._prune()
            except OSError as error:
                # The version stays; gone back to, its optimizer is begun anew.
                logger.warning("the trainer's state of version %d is not kept: %s", version, error)

    async def _prune(self, *, begin: bool = False) -> None:
        versions = {record.version: record.content_digest for record in self._table.list()}
        await in_thread(partial(_remove_useless, begin=begin), self.root, versions)


def _rename(new: Path, target: Path) -> None:
    # A version with this number and content has a state already: that of a job that was repeated.
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target)
    files.rename(new, target)
    files.flush_directory(target.parent)


def _remove_useless(root: Path, versions: dict[int, str], *, begin: bool) -> None:
    for folder in root.iterdir():
        found = _KEPT.fullmatch(folder.name)
        useless = begin if found is None else versions.get(int(found[1])) != found[2]
        if useless:
            shutil.rmtree(folder, ignore_errors=True)
