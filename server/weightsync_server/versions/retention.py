"""Which committed versions are deleted to bound the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from weightsync_server.versions.records import VersionRecord

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """Bounds on what is kept.

    Attributes:
        versions: Committed versions kept.
        bytes: Sum of their sizes; 0: no limit.
    """

    versions: int = 8
    bytes: int = 0

    def surplus(
        self, records: Iterable[VersionRecord], kept: Callable[[VersionRecord], bool]
    ) -> list[VersionRecord]:
        """Return what to delete, oldest first.

        Args:
            records: Committed versions.
            kept: True for versions that are never collected; they count all the same.
        """
        ordered = sorted(records, key=lambda record: record.version)
        count = len(ordered)
        size = sum(record.commit.size_bytes for record in ordered if record.commit)
        doomed = []
        for record in ordered:
            if count <= self.versions and (not self.bytes or size <= self.bytes):
                break
            if kept(record) or record.commit is None:
                continue
            doomed.append(record)
            count -= 1
            size -= record.commit.size_bytes
        return doomed
