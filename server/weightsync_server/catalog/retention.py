"""Which committed versions are deleted to bound the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightsync_server.catalog.record import VersionRecord

__all__ = ["Retention", "Surplus"]


class Surplus(NamedTuple):
    """What exceeds the bounds.

    Attributes:
        doomed: To delete, in this order: a delta goes before what it is based on.
        carried: They stay only because a version that stays is based on them.
        full: Bytes are over the limit, even when the doomed are gone.
    """

    doomed: list[VersionRecord]
    carried: list[VersionRecord]
    full: bool

    def weighs_on(self, newest: VersionRecord, most: int) -> bool:
        """Tell whether the newest version should be kept in full, so that the carried can go.

        Args:
            newest: The newest version.
            most: Versions that may be carried.
        """
        carried = sum(_stored(record) for record in self.carried)
        gains = newest.commit is not None and carried > newest.commit.size_bytes
        return len(self.carried) > most or (self.full and gains)


@dataclass(frozen=True)
class Retention:
    """Bounds on what is kept.

    Attributes:
        versions: Committed versions kept, without those that a kept delta is based on.
        bytes: Sum of what the store keeps of them; 0: no limit.
    """

    versions: int = 8
    bytes: int = 0

    def surplus(
        self, records: Iterable[VersionRecord], kept: Callable[[VersionRecord], bool]
    ) -> Surplus:
        """Return what exceeds the bounds, the oldest of it first chosen.

        Args:
            records: Committed versions.
            kept: True for versions that are never collected; they count all the same.
        """
        ordered = sorted(records, key=lambda record: record.order)
        count = len(ordered)
        size = sum(map(_stored, ordered))
        chosen = []
        for record in ordered:
            if count <= self.versions and (not self.bytes or size <= self.bytes):
                break
            if kept(record) or record.commit is None:
                continue
            chosen.append(record)
            count -= 1
            size -= _stored(record)
        return self._divided(ordered, chosen)

    def _divided(
        self, ordered: Sequence[VersionRecord], chosen: Sequence[VersionRecord]
    ) -> Surplus:
        gone = {record.version for record in chosen}
        needed = {
            base.version
            for record in ordered
            if record.version not in gone
            for base in record.chain[1:]
        }
        doomed = [record for record in reversed(chosen) if record.version not in needed]
        carried = [record for record in chosen if record.version in needed]
        left = sum(map(_stored, ordered)) - sum(map(_stored, doomed))
        return Surplus(doomed, carried, bool(self.bytes) and left > self.bytes)


def _stored(record: VersionRecord) -> int:
    return record.commit.stored_bytes if record.commit is not None else 0
