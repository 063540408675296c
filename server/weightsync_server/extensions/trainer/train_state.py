"""The states of optimizers: which version each belongs to, and the folders they are in.

The trainer writes one under a temporary name and makes it durable; here it gets its name in one
step, and goes when its version has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync_server.ops import durable_files as files
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread

if TYPE_CHECKING:
    from weightsync_server.catalog.table import VersionTable


logger = logging.getLogger(__name__)


KEEP, LOAD, RESET = "keep", "load", "reset"


@dataclass(frozen=True)
class StatePlan:
    """What a trainer does with its state before a job: KEEP, LOAD from `folder`, or RESET.

    `version` is the version whose state the trainer has then; with 0, it is begun anew.
    """

    action: str
    version: int
    folder: str = ""


@dataclass
class OptimizerState:
    """Of one process: the `version` whose state it has; with 0, it was begun anew.

    `live` is the version that it was set up on, or may go on from; it is 0 once a job has failed in
    it. `fresh` says that no job has been in it.
    """

    version: int = 0
    live: int = 0
    fresh: bool = True

    def plan(self, live: int, folder: Path | None) -> StatePlan:
        """Return what to do before a job, on the `live` version; `folder` None: it has no state."""
        if self.live == live and not self.fresh:
            return StatePlan(KEEP, self.version)
        if folder is not None:
            return StatePlan(LOAD, live, str(folder))
        # What it has copied when it was set up is of another version by now.
        return StatePlan(KEEP if self.live == live else RESET, 0)

    def begin(self, plan: StatePlan) -> None:
        """A job begins, after what was planned; until it has ended well its state is of no use."""
        self.version, self.live, self.fresh = plan.version, 0, False

    def end(self, live: int, committed: int) -> None:
        """A job has ended well on `live`; `committed` is the last it committed, 0: none."""
        self.live = live
        self.version = committed or self.version


_KEPT = re.compile(r"(\d+)-([0-9a-z]+)")
_NEW = "new-"


class StateFolders:
    """Knows which versions have a state of the optimizer.

    `root` is the folder of all of them; its parent is there. `table` has the versions there are.
    """

    def __init__(self, root: Path, table: VersionTable) -> None:
        self.root = root
        self._table = table
        self._keeping: set[asyncio.Task[None]] = set()
        # Whoever removes what is of no use knows of every version that has a folder.
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Make the folder, and remove what is of no use, such as what was never finished."""
        with translate_os_errors("opening the folder of the trainer's states"):
            await in_thread(partial(self.root.mkdir, 0o750, exist_ok=True))
            await self._prune(begin=True)

    def find(self, version: int) -> Path | None:
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
