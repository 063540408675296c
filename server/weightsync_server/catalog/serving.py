"""Which version is live, which were before, and which may become it: pins and rejections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from weightsync_server.catalog.pins import Pins
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable

__all__ = ["EngineServing", "ServingHistory", "ServingState"]

_KEPT = 64
_WORST_FIRST = (
    pb.LIVE_CHECK_FAILED,
    pb.LIVE_CHECK_PENDING,
    pb.LIVE_CHECK_UNSPECIFIED,
    pb.LIVE_CHECK_PASSED,
)


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


@dataclass(frozen=True)
class LiveComparison:
    """What is known of all live parameters of an engine, which hold a version or do not.

    Attributes:
        version: That version; 0: none.
        outcome: Whether they were compared.
        at_ns: When they were, Unix time in nanoseconds; 0: they were not.
    """

    version: int = 0
    outcome: pb.LiveCheck.ValueType = pb.LIVE_CHECK_PENDING
    at_ns: int = 0


class EngineServing:
    """What one engine serves, and served before. Changed on the event loop only.

    Args:
        name: Of the engine.
        table: The versions of the model.
        on_change: Called with the version that was live until now, and the one that is; 0: none.
        on_compared: Called with a version that its live parameters were compared with.

    Attributes:
        name: Of the engine.
        live: The version that every rank serves; 0: none does.
    """

    def __init__(
        self,
        name: str,
        table: VersionTable,
        on_change: Callable[[int, int], None],
        on_compared: Callable[[int], None],
    ) -> None:
        self.name = name
        self.live = 0
        self._table = table
        self._on_change = on_change
        self._on_compared = on_compared
        self._comparison = LiveComparison()
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
        before = self.live
        if version and version != before:
            self._history.add(version)
        self.live = version
        self._on_change(before, version)

    def set_live_check(self, version: int, check: pb.LiveCheck.ValueType) -> None:
        """Take note of whether all live parameters were compared with a version."""
        at_ns = 0 if check == pb.LIVE_CHECK_PENDING else clock.wall_ns()
        self._comparison = LiveComparison(version, check, at_ns)
        self._on_compared(version)

    @property
    def comparison(self) -> LiveComparison:
        """What is known of them and of the live version."""
        known = self._comparison
        return known if known.version == self.live else LiveComparison(self.live)


class ServingState:
    """What the engines of one model serve, and what they may. Changed on the event loop only.

    Args:
        table: The versions of the model.
        pins: What people decided about them.

    Attributes:
        on_replaced: Called with a version that was live until now.
    """

    def __init__(self, table: VersionTable, pins: Pins) -> None:
        self.on_replaced: Callable[[VersionRecord], None] = lambda _: None
        self._table = table
        self._pins = pins
        self._engines: dict[str, EngineServing] = {}

    def engine(self, name: str) -> EngineServing:
        """Return what one engine serves; nothing, if it is not known yet."""
        if name not in self._engines:
            self._engines[name] = EngineServing(name, self._table, self._changed, self._compared)
        return self._engines[name]

    def forget(self, name: str) -> None:
        """Take note that an engine is gone for good."""
        serving = self._engines.get(name)
        if serving is not None:
            serving.set_live(0)
            del self._engines[name]

    def is_live(self, version: int) -> bool:
        """Whether an engine serves a version."""
        return bool(version) and any(one.live == version for one in self._engines.values())

    @property
    def live(self) -> int:
        """The version that every engine serves; 0: there is none."""
        return _common(serving.live for serving in self._engines.values())

    @property
    def rollback_to(self) -> int:
        """The version that every engine would go back to; 0: there is none."""
        return _common(serving.rollback_to for serving in self._engines.values())

    @property
    def ways_back(self) -> frozenset[int]:
        """The versions that engines would go back to."""
        return frozenset(serving.rollback_to for serving in self._engines.values()) - {0}

    def _changed(self, before: int, live: int) -> None:
        left = self._table.find(before)
        for record in (left, self._table.find(live)):
            if record is not None:
                record.served = record.served or record.version == live
                self._compare(record)
                self._settle(record)
        if left is not None and not self.is_live(before):
            self.on_replaced(left)
        self._table.wake()

    def _compared(self, version: int) -> None:
        if (record := self._table.find(version)) is not None:
            self._compare(record)
            self._table.publish(record)

    def _compare(self, record: VersionRecord) -> None:
        """Put what the engines that serve a version know of their parameters into its record."""
        known = [one.comparison for one in self._engines.values() if one.live == record.version]
        if known:
            # Of several engines the one of which the worst is known, and the oldest such news.
            worst = min(known, key=lambda one: (_WORST_FIRST.index(one.outcome), one.at_ns))
            record.live_check, record.live_check_ns = worst.outcome, worst.at_ns

    async def pin(self, version: int, *, pinned: bool) -> VersionRecord:
        """Keep a version from being collected and evicted, or allow it again; persisted."""
        return await self._mark(version, pinned=pinned)

    async def reject(self, version: int, reason: str) -> None:
        """Make "newest" skip a version's content until `accept`; persisted."""
        await self._mark(version, rejected=reason or "no reason given")

    async def accept(self, version: int) -> None:
        """Make "newest" accept a version's content again, whatever its numbers; persisted."""
        content = self._table.get(version).content_digest
        await self._table.refused.accept(content)
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

    async def read_marks(self) -> None:
        """Take up what another server has decided since.

        Raises:
            WeightSyncError: The store cannot be read.
        """
        await self._pins.open()
        for record in self._table.list():
            self._renew_marks(record)

    def _renew_marks(self, record: VersionRecord) -> None:
        reason = self._pins.rejected.get(record.version, "")
        here = record.pinned, record.rejected_reason
        if record.commit is not None and here != (record.version in self._pins.pinned, reason):
            self.restore_marks(record)

    def _settle(self, record: VersionRecord) -> None:
        if self.is_live(record.version):
            record.serving = pb.SERVING_LIVE
        else:
            record.serving = pb.SERVING_REJECTED if record.rejected_reason else pb.SERVING_NO
        self._table.touch(record)


def _common(versions: Iterable[int]) -> int:
    """Return the one value; 0: there is none, or more."""
    values = set(versions)
    return values.pop() if len(values) == 1 else 0
