"""Looks whether what must always hold still does, at the start and now and then, and counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.model import Model
from weightsync_server.ops.metrics import Metrics
from weightsync_server.ops.tasks import cancel_tasks
from weightsync_server.store.protocol import Store

logger = logging.getLogger(__name__)

#: Seconds between two looks.
_EVERY_S = 30.0


class InvariantMonitor:
    """Counts a violation once, when two looks in a row see the same: work is between two steps.

    Each of `late` yields a sentence for everything that goes on past its bound.
    """

    def __init__(
        self,
        model: Model,
        metrics: Metrics,
        late: Sequence[Callable[[], Iterable[str]]] = (),
    ) -> None:
        self._model, self._metrics, self._late = model, metrics, late
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
        await cancel_tasks(self._task)

    def look(self) -> None:
        """Compare the parts of the server with each other and with the look before."""
        found = {(invariant, what): more for invariant, what, more in self._wrong()}
        stays = found.keys() & self._suspected
        for invariant, what in sorted(stays - self._counted):
            more = found[invariant, what]
            logger.critical("invariant %s is violated: %s%s", invariant, what, more)
            self._metrics.violate(invariant)
        # What passes and comes again counts again.
        self._counted = stays
        self._suspected = set(found)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                self.look()
            except Exception:
                logger.exception("counting the members and ranks failed")

    def _wrong(self) -> Iterator[tuple[str, str, str]]:
        """Yield everything that must not be: label, what it is, and figures that may change."""
        slots, segments = self._model.slots, self._model.segments
        budget, epoch = segments.budget, self._model.epochs.newest
        stray = budget.reserved - slots.reserved_bytes - segments.retired_bytes
        if stray:
            yield "no_leak", "segments are reserved but in no slot", f": {stray} bytes"
        if budget.reserved > budget.limit:
            figures = f": {budget.reserved} of {budget.limit} bytes"
            yield "bounded", "more memory is reserved than allowed", figures
        if epoch < self._epoch:
            yield "stale_writer", f"the epoch fell from {self._epoch}", f" to {epoch}"
        self._epoch = max(self._epoch, epoch)
        yield from self._changed()
        yield from self._twice()
        for overdue in self._late:
            for text in overdue():
                yield "time_bounded", text, ""

    def _changed(self) -> Iterator[tuple[str, str, str]]:
        committed = {}
        for record in self._model.table.list():
            if record.durability != pb.DURABILITY_COMMITTED:
                continue
            if record.commit is None:
                yield (
                    "commit_atomic",
                    f"version {record.version} is listed as committed but is not",
                    "",
                )
                continue
            digest = committed[record.version] = record.commit.content_digest
            before = self._contents.get(record.version, digest)
            if before != digest:
                yield (
                    "version_immutable",
                    f"version {record.version} changed",
                    f" from {before} to {digest}",
                )
                committed[record.version] = before
        self._contents = committed

    def _twice(self) -> Iterator[tuple[str, str, str]]:
        first: dict[str, int] = {}
        for record in self._model.table.list():
            key = record.commit.idempotency_key if record.commit is not None else ""
            other = first.setdefault(key, record.version)
            if key and other != record.version:
                yield "idempotent", f"versions {record.version} and {other} have one key", ""


def count_lost(store: Store, known: Container[int], live: int, metrics: Metrics) -> None:
    """Count what a start does not find although it was acknowledged.

    Files are flushed before the record that names them, and a version before it is made live, so
    that no crash leaves this: somebody, or a disk, has taken it away.

    The `store` is opened, and `known` are the committed versions that it has. `live` is the version
    that was live and lay in this store; 0: none did.
    """
    lost = list(store.lost)
    if live and live not in known:
        lost.append(f"version {live}, the live one, is not in the store")
    for text in lost:
        logger.critical("invariant crash_safe is violated: %s", text)
        metrics.violate("crash_safe")
