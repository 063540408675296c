"""What versions and pushes need of others: processes that work on segments, and whoever counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import Future

    from weightsync.manifest import ShardEntry
    from weightsync.segments import Segment

__all__ = ["Fetchers", "Meters", "NoMeters"]


class Fetchers(Protocol):
    """Works on segments in other processes; `weightsync_server.fetchers.FetcherPool` does."""

    async def digest(self, segment: Segment, shard: ShardEntry) -> list[bytes]:
        """Return the digest of each tensor, in the order of `weightsync.layout.check_shard`."""

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

    def forget(self, segment_id: str) -> Future[list[None]]:
        """Unmap a segment everywhere; the result tells when."""


class Meters(Protocol):
    """Counts pushes, bytes and durations. Called on the event loop; never blocks."""

    def observe_phase(self, phase: str, seconds: float) -> None:
        """Add one duration of `receive`, `digest` or `persist`."""

    def count_push(self, outcome: str) -> None:
        """Count the end of a push: `committed`, `already`, `failed` or `aborted`."""

    def add_received(self, size: int) -> None:
        """Count received bytes."""


class NoMeters:
    """Counts nothing."""

    def observe_phase(self, phase: str, seconds: float) -> None:
        """Ignore it."""

    def count_push(self, outcome: str) -> None:
        """Ignore it."""

    def add_received(self, size: int) -> None:
        """Ignore it."""
