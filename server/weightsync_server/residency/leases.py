"""A lease keeps the bytes of a staged version where they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.residency.slot import Slot

__all__ = ["SlotLease"]


@dataclass(eq=False)
class SlotLease:
    """While it is held, the segments are neither written nor retired.

    Attributes:
        record: The version.
        staged_id: Name of its `StagedVersion` document on the segment socket.
        segments: Segment of each shard, in order.
        slot: Where they lie; counts this lease already.
        on_release: Called once.
    """

    record: VersionRecord
    staged_id: str
    segments: list[Segment]
    slot: Slot = field(repr=False)
    on_release: Callable[[], None] = field(repr=False)
    _active: bool = True

    def release(self) -> None:
        """End it; further calls do nothing."""
        if self._active:
            self._active = False
            self.on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
