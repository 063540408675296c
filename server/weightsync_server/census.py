"""Looks now and then whether what must always hold still does, and counts where it does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync_server.metrics import Metrics
    from weightsync_server.versions import ModelVersions, SegmentBudget

__all__ = ["Census"]

logger = logging.getLogger(__name__)

#: Seconds between two looks.
_EVERY_S = 30.0


class Census:
    """Counts a violation once, when two looks in a row see the same: work is between two steps.

    Args:
        versions: The versions of the one model.
        budget: Memory of segments.
        metrics: Where violations are counted.
    """

    def __init__(self, versions: ModelVersions, budget: SegmentBudget, metrics: Metrics) -> None:
        self._versions = versions
        self._budget = budget
        self._metrics = metrics
        self._contents: dict[int, str] = {}
        self._epoch = 0
        self._suspected: set[tuple[str, str]] = set()
        self._counted: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="census")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def look(self) -> None:
        """Compare the parts of the server with each other and with the look before."""
        found = set(self._wrong())
        for invariant, text in sorted((found & self._suspected) - self._counted):
            logger.critical("invariant %s is violated: %s", invariant, text)
            self._metrics.violate(invariant)
        self._counted |= found & self._suspected
        self._suspected = found

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                self.look()
            except Exception:
                logger.exception("the census failed")

    def _wrong(self) -> Iterator[tuple[str, str]]:
        """Yield label and sentence of everything that must not be."""
        budget, versions = self._budget, self._versions
        stray = budget.reserved - versions.pool.reserved_bytes - versions.keeper.retired_bytes
        if stray:
            yield "no_leak", f"{stray} bytes of segments are reserved and in no slot"
        if budget.reserved > budget.limit:
            yield "bounded", f"{budget.reserved} of {budget.limit} bytes are reserved"
        if versions.epoch < self._epoch:
            yield "stale_writer", f"the epoch fell from {self._epoch} to {versions.epoch}"
        self._epoch = max(self._epoch, versions.epoch)
        yield from self._changed()

    def _changed(self) -> Iterator[tuple[str, str]]:
        committed = {}
        for record in self._versions.list():
            if record.durability != pb.DURABILITY_COMMITTED:
                continue
            if record.commit is None:
                yield "commit_atomic", f"version {record.version} counts as committed and is not"
                continue
            digest = committed[record.version] = record.commit.content_digest
            before = self._contents.get(record.version, digest)
            if before != digest:
                yield "version_immutable", f"version {record.version} changed from {before}"
                committed[record.version] = before
        self._contents = committed
