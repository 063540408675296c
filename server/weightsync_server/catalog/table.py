"""The versions of one model: which exist, which is newest, which number is next, what changed."""

from __future__ import annotations

import asyncio
import builtins
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.refused_contents import RefusedContents

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from weightsync.model.manifest import Manifest
    from weightsync_server.catalog.pins import Pins

__all__ = ["VersionTable"]


class VersionTable:
    """The versions of one model by number.

    Args:
        name: Model name.
        pins: Remember the numbers of deleted versions.
        reserved: Number kept for the engine's checkpoint; 0: none.

    Attributes:
        on_change: Called with each version that came, changed, or was removed: then the table
            does not have it any more.
        on_free: Called when something that somebody waits for may have come free.
        on_damage: Called with each committed version of which bytes turn out to be wrong.
        refused: What engines have refused for its content.
    """

    def __init__(self, name: str, pins: Pins, reserved: int = 0) -> None:
        self.name = name
        self.on_change: list[Callable[[VersionRecord], None]] = []
        self.on_free: list[Callable[[], None]] = []
        self.on_damage: list[Callable[[VersionRecord], None]] = []
        self.refused = RefusedContents()
        self.refused.on_change = self._show_refused
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
        """Register a version."""
        self._records[record.version] = record
        self.touch(record)

    def remove(self, record: VersionRecord) -> None:
        """Take a version out at once; what the store holds of it must be erased afterwards."""
        if record.commit is not None or record.served:
            # Nor does anybody get its number, while that is being written down.
            self._spent = max(self._spent, 0 if record.local else record.version)
        del self._records[record.version]
        record.residency = pb.RESIDENCY_ABSENT
        for observer in self.on_change:
            observer(record)

    def publish(self, record: VersionRecord) -> None:
        """Tell observers of a version, unless they were told already that it is gone."""
        if record.commit is not None:
            record.refused_reason = self.refused.reason(record.commit.content_digest)
        if self.find(record.version) is record:
            for observer in self.on_change:
                observer(record)

    def _show_refused(self, digests: Iterable[str]) -> None:
        changed = set(digests)
        for record in self.list():
            if record.commit is not None and record.commit.content_digest in changed:
                self.publish(record)

    def touch(self, record: VersionRecord) -> None:
        """Tell observers, and those who wait for a slot."""
        self.publish(record)
        self.wake()

    def wake(self) -> None:
        """Tell those who wait that something may have come free."""
        for waiter in self.on_free:
            waiter()

    def staged(self, record: VersionRecord, manifest: Manifest) -> None:
        """Take note that all bytes lie in the version's slot, verified."""
        record.manifest = manifest
        record.residency = pb.RESIDENCY_STAGED
        record.place.settle()
        self.touch(record)

    def report_damage(self, record: VersionRecord) -> None:
        """Tell observers that bytes of a committed version are wrong, in memory or the store."""
        for observer in self.on_damage:
            observer(record)

    # Look-ups

    @property
    def newest(self) -> int:
        """Newest committed version; 0: none."""
        shared = (r for r in self._records.values() if r.commit and not r.local)
        return max((record.version for record in shared), default=0)

    @property
    def highest(self) -> int:
        """Highest number that was ever committed, deleted versions included."""
        return max(self.newest, self._pins.highest, self._spent)

    def find(self, version: int) -> VersionRecord | None:
        """Return a version, or None."""
        return self._records.get(version)

    def get(self, version: int) -> VersionRecord:
        """Return a version.

        Raises:
            WeightSyncError: VERSION_UNKNOWN.
        """
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
        """Return all versions, newest first."""
        return sorted(self._records.values(), key=lambda record: -record.version)

    def newest_applicable(self, engines: Collection[str] = ()) -> VersionRecord:
        """Return the newest version that is committed and whose content is not rejected.

        Args:
            engines: None of them has refused it either.

        Raises:
            WeightSyncError: VERSION_UNKNOWN.
        """
        # The content is what was found bad: pushed again it is no better under another number.
        rejected = {r.content_digest for r in self.list() if r.rejected_reason}
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

    def next_version(self) -> int:
        """Return the lowest number above all versions, those that are being pushed included."""
        shared = (record.version for record in self._records.values() if not record.local)
        return max(self.highest, self._reserved, *shared) + 1

    async def add_in_place(self, transaction_id: str) -> VersionRecord:
        """Register a version that lies in an engine's memory alone; persisted: its number is used.

        Args:
            transaction_id: What has written it there; the idempotency key of its push.

        Raises:
            WeightSyncError: The store cannot be written.
        """
        record = VersionRecord(self.name, self.next_version(), in_place=transaction_id)
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
        """Return a version that comes in once it is committed; None: it is gone, or too late.

        Args:
            version: The version.
            timeout_s: Longest time to wait, in seconds.
        """
        changed = asyncio.Event()

        def look(_: VersionRecord) -> None:
            changed.set()

        self.on_change.append(look)
        try:
            async with asyncio.timeout(timeout_s):
                while (record := self.find(version)) is not None and record.commit is None:
                    changed.clear()
                    await changed.wait()
            return record
        except TimeoutError:
            return None
        finally:
            self.on_change.remove(look)

    def same_content(self, content_digest: str) -> VersionRecord | None:
        """Return the newest committed version with this content, or None."""
        same = (r for r in self.list() if r.commit and r.content_digest == content_digest)
        return max(same, key=lambda record: record.order, default=None)

    def brought_by(self, *, push_id: str = "", key: str = "") -> VersionRecord | None:
        """Return the newest committed version of a push, by its id or its key, or None."""
        for record in self.list():
            commit = record.commit
            if commit is None or not commit.push_id:
                continue
            if (push_id and commit.push_id == push_id) or (key and commit.idempotency_key == key):
                return record
        return None

    def not_above(self, version: int) -> WeightSyncError:
        """Return the refusal of a number that is not above all that were used."""
        return WeightSyncError(
            Reason.VERSION_NOT_ABOVE,
            f"version {version} is not above {self.highest}, the newest of model {self.name}; push "
            f"it as {self.highest + 1} or higher, or as 0 for the next number",
            metadata={"newest_version": str(self.highest)},
        )
