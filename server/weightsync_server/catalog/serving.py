"""Which version is live, which were before, and which may become it: pins and rejections."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.version_events import LiveReplaced

if TYPE_CHECKING:
    from weightsync_server.catalog.pins import Pins
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable


_KEPT = 64
_WORST_FIRST = (
    pb.LIVE_CHECK_FAILED,
    pb.LIVE_CHECK_PENDING,
    pb.LIVE_CHECK_UNSPECIFIED,
    pb.LIVE_CHECK_PASSED,
)


@dataclass(frozen=True)
class LiveComparison:
    """What is known of all live parameters of an engine; a `version` of 0 is none.

    `at_ns` is the Unix time when they were compared, 0 if they were not.
    """

    version: int = 0
    outcome: pb.LiveCheck.ValueType = pb.LIVE_CHECK_PENDING
    at_ns: int = 0


class EngineServing:
    """What one engine serves, and served before. Changed on the event loop only.

    `live` is the version that every rank serves, or 0. `on_change` is called with the old and the
    new one, `on_compared` with a version that the live parameters were compared with.
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
        #: What the last gate of this engine has shown; None: there was none.
        self.gate: pb.GateReport | None = None
        self._history: list[int] = []

    @property
    def rollback_to(self) -> int:
        """The version that was live before and is still good; 0: none."""

        def good(version: int) -> bool:
            record = self._table.find(version)
            if record is None or record.commit is None:
                return False
            # The content is what was found bad, under whatever number.
            return not (self._table.rejection(record) or self._table.hold(record))

        return next((v for v in reversed(self._history) if v != self.live and good(v)), 0)

    def restore_history(self, *versions: int) -> None:
        self._history = [one for one in versions if self._table.find(one) is not None]

    def set_live(self, version: int) -> None:
        before = self.live
        if version and version != before:
            if version in self._history:
                # Gone back: what came after it is no way back any more.
                del self._history[self._history.index(version) :]
            self._history = [*self._history, version][-_KEPT:]
        self.live = version
        self._on_change(before, version)

    def set_live_check(self, version: int, check: pb.LiveCheck.ValueType) -> None:
        at_ns = 0 if check == pb.LIVE_CHECK_PENDING else clock.wall_ns()
        self._comparison = LiveComparison(version, check, at_ns)
        self._on_compared(version)

    @property
    def comparison(self) -> LiveComparison:
        known = self._comparison
        return known if known.version == self.live else LiveComparison(self.live)


class ServingState:
    """What the engines of a model serve, and may serve. Changed on the event loop only.

    `LiveReplaced` is published with the version that was live before.
    """

    def __init__(self, table: VersionTable, pins: Pins) -> None:
        self._table = table
        self._pins = pins
        self._engines: dict[str, EngineServing] = {}

    def engine(self, name: str) -> EngineServing:
        if name not in self._engines:
            self._engines[name] = EngineServing(name, self._table, self._changed, self._compared)
        return self._engines[name]

    def forget(self, name: str) -> None:
        serving = self._engines.pop(name, None)
        if serving is not None:
            left = serving.live
            serving.set_live(0)
            # All others may serve one version now, where this one served another.
            if self.live != left and (record := self._table.find(self.live)) is not None:
                self._settle(record)

    def is_live(self, version: int) -> bool:
        return bool(version) and any(one.live == version for one in self._engines.values())

    @property
    def live(self) -> int:
        """The version that every engine serves; 0: there is none."""
        return _common(serving.live for serving in self._engines.values())

    @property
    def rollback_to(self) -> int:
        return _common(serving.rollback_to for serving in self._engines.values())

    @property
    def ways_back(self) -> frozenset[int]:
        return frozenset(serving.rollback_to for serving in self._engines.values()) - {0}

    def _changed(self, before: int, live: int) -> None:
        left = self._table.find(before)
        for record in (left, self._table.find(live)):
            if record is not None:
                if record.version == live:
                    record.go_live()
                self._compare(record)
                self._settle(record)
        if left is not None and not self.is_live(before):
            self._table.events.publish(LiveReplaced(left))
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
            record.compare(worst.outcome, worst.at_ns)

    async def pin(self, version: int, *, pinned: bool) -> VersionRecord:
        """Keep a version from being collected and evicted, or allow it again; persisted."""
        return await self._mark(version, pinned=pinned)

    async def reject(self, version: int, reason: str) -> None:
        """Make "newest" skip a version's content until `accept`; persisted."""
        await self._mark(version, rejected=reason or "no reason given")

    async def withhold(self, version: int, reason: str) -> None:
        """Let nobody apply a version's content until `accept`; persisted."""
        await self._mark(version, on_hold=reason or "no reason given")

    async def accept(self, version: int) -> None:
        """Make "newest" accept a version's content again, whatever its numbers; persisted."""
        content = self._table.get(version).content_digest
        await self._table.refused.accept(content)
        for record in self._table.list():
            if record.version == version or (content and record.content_digest == content):
                await self._mark(record.version, rejected="", on_hold="")

    async def _mark(
        self,
        version: int,
        *,
        pinned: bool | None = None,
        rejected: str | None = None,
        on_hold: str | None = None,
    ) -> VersionRecord:
        record = self._table.get(version)
        await self._pins.change(version, pinned=pinned, rejected=rejected, on_hold=on_hold)
        self.restore_marks(record)
        return record

    def restore_marks(self, record: VersionRecord) -> None:
        record.mark(
            pinned=record.version in self._pins.pinned,
            rejected_reason=self._pins.rejected.get(record.version, ""),
            hold_reason=self._pins.on_hold.get(record.version, ""),
        )
        self._settle(record)

    async def read_marks(self) -> None:
        await self._pins.open()
        for record in self._table.list():
            self._renew_marks(record)

    def _renew_marks(self, record: VersionRecord) -> None:
        version, pins = record.version, self._pins
        here = record.pinned, record.rejected_reason, record.hold_reason
        kept = version in pins.pinned, pins.rejected.get(version, ""), pins.on_hold.get(version, "")
        if record.commit is not None and here != kept:
            self.restore_marks(record)

    def _settle(self, record: VersionRecord) -> None:
        record.serve(live=self.is_live(record.version))
        self._table.touch(record)


def _common(versions: Iterable[int]) -> int:
    values = set(versions)
    return values.pop() if len(values) == 1 else 0
