"""Which version is live, which were before, and which may become it: pins and rejections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync_server.catalog.pins import Pins
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable

__all__ = ["ServingHistory", "ServingState"]

_KEPT = 64


class ServingHistory:
    """Versions in the order in which they became live."""

    def __init__(self) -> None:
        self._versions: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self._versions)

    def restore(self, versions: Sequence[int]) -> None:
        """Begin with these, oldest first."""
        self._versions = list(versions)

    def add(self, version: int) -> None:
        """Take note that a version became live."""
        if version in self._versions:
            # Gone back: what came after it is no way back any more.
            del self._versions[self._versions.index(version) :]
        self._versions = [*self._versions, version][-_KEPT:]

    def before(self, live: int, good: Callable[[int], bool]) -> int:
        """Return the last version other than `live` that is still good; 0: none."""
        return next((v for v in reversed(self._versions) if v != live and good(v)), 0)


class ServingState:
    """What the engine serves of one model. Changed on the event loop only.

    Args:
        table: The versions of the model.
        pins: What people decided about them.

    Attributes:
        live: The version that every rank serves; 0: none does.
        on_replaced: Called with a version that was live until now.
    """

    def __init__(self, table: VersionTable, pins: Pins) -> None:
        self.live = 0
        self.on_replaced: Callable[[VersionRecord], None] = lambda _: None
        self._table = table
        self._pins = pins
        self._history = ServingHistory()

    @property
    def rollback_to(self) -> int:
        """The version that was live before and is still good; 0: none."""

        def good(version: int) -> bool:
            record = self._table.find(version)
            return bool(record and record.commit and not record.rejected_reason)

        return self._history.before(self.live, good)

    def restore_history(self, *versions: int) -> None:
        """Take over which versions were live, oldest first, as the journal says."""
        known = [version for version in versions if self._table.find(version) is not None]
        self._history.restore(known)

    def set_live(self, version: int) -> None:
        """Take note that every rank serves a version; 0: none does."""
        before = self._table.find(self.live)
        if version and version != self.live:
            self._history.add(version)
        self.live = version
        for record in (before, self._table.find(version)):
            if record is not None:
                record.served = record.served or record.version == version
                self._settle(record)
        if before is not None:
            self.on_replaced(before)
        self._table.wake()

    def set_live_check(self, version: int, check: pb.LiveCheck.ValueType) -> None:
        """Take note of whether the live parameters of a version were compared as a whole."""
        if (record := self._table.find(version)) is not None:
            record.check(check)
            self._table.publish(record)

    async def pin(self, version: int, *, pinned: bool) -> VersionRecord:
        """Keep a version from being collected and evicted, or allow it again; persisted."""
        return await self._mark(version, pinned=pinned)

    async def reject(self, version: int, reason: str) -> None:
        """Make "newest" skip a version's content until `accept`; persisted."""
        await self._mark(version, rejected=reason or "no reason given")

    async def accept(self, version: int) -> None:
        """Make "newest" accept a version's content again, whatever its numbers; persisted."""
        content = self._table.get(version).content_digest
        for record in self._table.list():
            if record.version == version or (content and record.content_digest == content):
                await self._mark(record.version, rejected="")

    async def _mark(
        self, version: int, *, pinned: bool | None = None, rejected: str | None = None
    ) -> VersionRecord:
        record = self._table.get(version)
        await self._pins.change(version, pinned=pinned, rejected=rejected)
        self.restore_marks(record)
        return record

    def restore_marks(self, record: VersionRecord) -> None:
        """Put what was decided about a version, as persisted, into its record."""
        record.pinned = record.version in self._pins.pinned
        record.rejected_reason = self._pins.rejected.get(record.version, "")
        self._settle(record)

    def renew_marks(self, record: VersionRecord) -> None:
        """Do the same where another server has decided something since."""
        reason = self._pins.rejected.get(record.version, "")
        here = record.pinned, record.rejected_reason
        if record.commit is not None and here != (record.version in self._pins.pinned, reason):
            self.restore_marks(record)

    def _settle(self, record: VersionRecord) -> None:
        if record.version == self.live:
            record.serving = pb.SERVING_LIVE
        else:
            record.serving = pb.SERVING_REJECTED if record.rejected_reason else pb.SERVING_NO
        self._table.touch(record)
