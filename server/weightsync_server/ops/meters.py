"""What versions and pushes need of others: processes that work on segments, and whoever counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import Future

    from weightsync.model.manifest import ShardEntry
    from weightsync.shm.segments import Segment
    from weightsync_server.deltas import DeltaCounts
    from weightsync_server.workers.fetch.delta_summary import DeltaHeader, TensorDelta

__all__ = ["Fetchers", "Meters", "NoMeters"]


class Fetchers(Protocol):
    """Works on segments in other processes; `weightsync_server.workers.fetch.FetcherPool` does."""

    async def digest(self, segment: Segment, shard: ShardEntry) -> list[bytes]:
        """Return the digest of each tensor, in the order of `check_shard`."""

    async def persist(self, segment: Segment, size: int, target: str) -> None:
        """Write the first `size` bytes to the file `target`, durably."""

    async def keep(
        self, segment: Segment, shard: ShardEntry, begin: int, end: int, target: str
    ) -> None:
        """Make the bytes from `begin` to `end` durable, so that `restore` finds them."""

    async def restore(self, segment: Segment, shard: ShardEntry, source: str) -> int:
        """Fill a segment with what was kept of a shard; return how many bytes are undamaged."""

    async def load(self, source_fd: int | str, size: int, segment: Segment) -> None:
        """Fill the first `size` bytes with a whole file."""

    async def copy(self, source: Segment, size: int, segment: Segment) -> None:
        """Fill the first `size` bytes with those of another segment."""

    async def inspect(
        self, layout: Segment, shard: ShardEntry, source: Segment | str
    ) -> tuple[DeltaHeader, list[TensorDelta]]:
        """Prove that a delta shard is whole; return what it is of, and what it changes."""

    async def patch(
        self,
        segment: Segment,
        index: int,
        layout: Segment,
        shard: ShardEntry,
        source: Segment | str,
    ) -> None:
        """Change the canonical shard `index` as a delta shard tells; never tried twice."""

    def warm(self) -> None:
        """Get ready for deltas: the first one would be slow."""

    def forget(self, segment_id: str) -> Future[list[None]]:
        """Unmap a segment everywhere; the result tells when."""


class Meters(Protocol):
    """Counts pushes, bytes and durations. Called on the event loop; never blocks."""

    def observe_phase(self, phase: str, seconds: float) -> None:
        """Add one duration of `receive`, `digest`, `persist` or `patch`."""

    def count_push(self, outcome: str) -> None:
        """Count the end of a push: `committed`, `already`, `failed` or `aborted`."""

    def add_received(self, size: int) -> None:
        """Count received bytes."""

    def count_delta(self, counts: DeltaCounts) -> None:
        """Count a delta that was committed."""

    def count_fallback(self, reason: str) -> None:
        """Count a full push of a trainer that would have sent a delta, and why it did not."""


class NoMeters:
    """Counts nothing."""

    def observe_phase(self, phase: str, seconds: float) -> None:
        """Ignore it."""

    def count_push(self, outcome: str) -> None:
        """Ignore it."""

    def add_received(self, size: int) -> None:
        """Ignore it."""

    def count_delta(self, counts: DeltaCounts) -> None:
        """Ignore it."""

    def count_fallback(self, reason: str) -> None:
        """Ignore it."""
