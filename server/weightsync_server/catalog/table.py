"""The versions of one model: which exist, which is newest, which number is next, what changed."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.pins import Pins
from weightsync_server.catalog.record import BY_GATE, VersionRecord
from weightsync_server.catalog.refused_contents import RefusedContents
from weightsync_server.catalog.version_events import (
    EventBus,
    SlotFreed,
    VersionChanged,
    VersionDamaged,
)

if TYPE_CHECKING:
    from weightsync.model.manifest import Manifest
    from weightsync_server.catalog.in_place_push import InPlacePush


class VersionTable:
    """The versions of one model by number.

    `pins` remember deleted numbers. `reserved` is the number kept for the engine's checkpoint; 0:
    none. `events` hear of `VersionChanged`, `VersionDamaged` and `SlotFreed`.
    """

    def __init__(self, name: str, pins: Pins, events: EventBus, reserved: int = 0) -> None:
        self.name = name
        self.events = events
        self.refused = RefusedContents(self._show_refused)
        self._pins = pins
        self._reserved = reserved
        self._records: dict[int, VersionRecord] = {}
        # Highest number that is being deleted, before it is written down.
        self._spent = 0

    # Changes

    def load(self, record: VersionRecord) -> None:
        """Take in what the store had when it was opened; nobody is told."""
        self._records[record.version] = record

    def add(self, record: VersionRecord) -> None:
        self._records[record.version] = record
        self.touch(record)

    def remove(self, record: VersionRecord) -> None:
        """Take a version out at once; what the store holds of it must be erased afterwards."""
        if record.commit is not None or record.served:
            # Nor does anybody get its number, while that is being written down.
            self._spent = max(self._spent, 0 if record.local else record.version)
        del self._records[record.version]
        record.leave_memory()
        self.events.publish(VersionChanged(record))

    def publish(self, record: VersionRecord) -> None:
        """Tell observers of a version, unless they were told already that it is gone."""
        if record.commit is not None:
            record.refuse(self.refused.reason(record.commit.content_digest))
        if self.find(record.version) is record:
            self.events.publish(VersionChanged(record))

    def _show_refused(self, digests: Iterable[str]) -> None:
        changed = set(digests)
        for record in self.list():
            if record.commit is not None and record.commit.content_digest in changed:
                self.publish(record)

    def touch(self, record: VersionRecord) -> None:
        self.publish(record)
        self.wake()

    def wake(self) -> None:
        self.events.publish(SlotFreed())

    def staged(self, record: VersionRecord, manifest: Manifest) -> None:
        record.become_staged(manifest)
        self.touch(record)

    def report_damage(self, record: VersionRecord) -> None:
        """Tell observers that bytes of a committed version are wrong, in memory or the store."""
        self.events.publish(VersionDamaged(record))

    # Look-ups

    @property
    def newest(self) -> int:
        shared = (r for r in self._records.values() if r.commit and not r.local)
        return max((record.version for record in shared), default=0)

    @property
    def highest(self) -> int:
        """Highest number that was ever committed, deleted versions included."""
        return max(self.newest, self._pins.highest, self._spent)

    def find(self, version: int) -> VersionRecord | None:
        return self._records.get(version)

    def committed(self, version: int) -> VersionRecord | None:
        record = self._records.get(version)
        return record if record is not None and record.commit is not None else None

    def get(self, version: int) -> VersionRecord:
        record = self._records.get(version)
        if record is None:
            newest = self.newest
            known = f"the newest is {newest}" if newest else "it has none yet; push one"
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN,
                f"model {self.name} has no version {version}: {known}",
                metadata={"newest_version": str(newest)},
            )
        return record

    def list(self) -> builtins.list[VersionRecord]:
        return sorted(self._records.values(), key=lambda record: -record.version)

    def newest_applicable(self, engines: Collection[str] = ()) -> VersionRecord:
        """Return the newest committed version that nobody rejects and no engine here refuses."""
        # The content is what was found bad: pushed again it is no better under another number.
        marked = (r for r in self.list() if r.rejected_reason or r.hold_reason)
        rejected = {r.content_digest for r in marked}
        for record in sorted(self.list(), key=lambda record: -record.order):
            committed = record.durability == pb.DURABILITY_COMMITTED
            if committed and record.content_digest not in rejected:
                if self.refused.refused_by(engines, record.content_digest):
                    continue
                return record
        raise WeightSyncError(
            Reason.VERSION_UNKNOWN,
            f"model {self.name} has no committed version that is not rejected; push one",
        )

    def rejection(self, record: VersionRecord) -> str:
        """Return why a version is rejected, or a gate its content under any number; "": it is not.

        What somebody rolled back may be pushed and applied again under another number.
        """
        if record.rejected_reason:
            return record.rejected_reason
        reasons = (one.rejected_reason for one in self._same(record))
        return next((reason for reason in reasons if reason.startswith(BY_GATE)), "")

    def hold(self, record: VersionRecord) -> str:
        """Return why a version's content is held, under whatever number; "": it is not."""
        return next((one.hold_reason for one in self._same(record) if one.hold_reason), "")

    def _same(self, record: VersionRecord) -> builtins.list[VersionRecord]:
        content = record.content_digest
        others = (one for one in self.list() if content and one.content_digest == content)
        return [record, *others]

    def next_version(self) -> int:
        shared = (record.version for record in self._records.values() if not record.local)
        return max(self.highest, self._reserved, *shared) + 1

    async def add_in_place(self, push: InPlacePush) -> VersionRecord:
        """Register a version that lies in an engine's memory alone, and persist its number.

        `push` is to bring it; the next server refuses that, for it knows of no transaction.
        """
        record = VersionRecord(self.name, self.next_version(), in_place=push)
        self.add(record)
        try:
            await self._pins.use(record.version)
        except BaseException:
            self.remove(record)
            raise
        return record

    def adoption_version(self) -> int:
        """Return the number for the engine's checkpoint: the reserved one, unless it was used."""
        spent = max(self._pins.highest, self._spent)
        used = self._reserved in self._records or spent >= self._reserved
        return self.next_version() if used or not self._reserved else self._reserved

    async def settled(self, version: int, timeout_s: float) -> VersionRecord | None:
        """Return a version that comes in once it is committed; None: it is gone, or too late."""
        changed = asyncio.Event()

        def look(_: VersionChanged) -> None:
            changed.set()

        self.events.on(VersionChanged, look)
        try:
            async with asyncio.timeout(timeout_s):
                while (record := self.find(version)) is not None and record.commit is None:
                    changed.clear()
                    await changed.wait()
            return record
        except TimeoutError:
            return None
        finally:
            self.events.off(VersionChanged, look)

    def same_content(self, content_digest: str) -> VersionRecord | None:
        same = (r for r in self.list() if r.commit and r.content_digest == content_digest)
        return max(same, key=lambda record: record.order, default=None)

    def brought_by(self, *, push_id: str = "", key: str = "") -> VersionRecord | None:
        for record in self.list():
            commit = record.commit
            if commit is None or not commit.push_id:
                continue
            if (push_id and commit.push_id == push_id) or (key and commit.idempotency_key == key):
                return record
        return None

    def not_above(self, version: int) -> WeightSyncError:
        return WeightSyncError(
            Reason.VERSION_NOT_ABOVE,
            f"version {version} is not above {self.highest}, the newest of model {self.name}; push "
            f"it as {self.highest + 1} or higher, or as 0 for the next number",
            metadata={"newest_version": str(self.highest)},
        )


def check_model(asked: str, served: str) -> None:
    if asked != served:
        raise WeightSyncError(
            Reason.MODEL_UNKNOWN,
            f"model {asked!r} is not configured; this server has {served!r}",
        )
