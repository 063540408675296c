"""The memory that segments may take: reserved in numbers first, so that writing never fails."""

from __future__ import annotations

from weightsync.errors import Reason, WeightSyncError
from weightsync.free_memory import available_bytes
from weightsync_server.ops.os_errors import write_fault

__all__ = ["SegmentBudget"]

#: Left to everything else on the host, in bytes.
_HEADROOM = 64 << 20


class SegmentBudget:
    """Counts shared memory of all models; what it grants never exceeds its limit or the host.

    Args:
        limit_bytes: Most bytes reserved at once; 0: 80 % of what is available now.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit = limit_bytes or available_bytes() * 8 // 10
        self.reserved = 0
        self._untouched = 0

    def reserve(self, size: int) -> None:
        """Count `size` bytes that `touched` or `release` will follow.

        Raises:
            WeightSyncError: MEMORY_EXHAUSTED with the numbers, DISK_EXHAUSTED (descriptors);
                nothing is reserved.
        """
        if self.reserved + size > self.limit:
            raise WeightSyncError(
                Reason.MEMORY_EXHAUSTED,
                f"{size} bytes of shared memory are needed, {self.reserved} of {self.limit} are "
                "reserved; raise memory_bytes, lower slots, or delete or unpin versions",
                metadata=self._numbers(size),
            )
        try:
            free = available_bytes()
        except OSError as error:
            # No descriptor is left to ask with.
            raise write_fault(error, "asking for the free memory of the host") from error
        # What was reserved but not written yet does not show in the host's numbers.
        free -= self._untouched + _HEADROOM
        if size > free:
            raise WeightSyncError(
                Reason.MEMORY_EXHAUSTED,
                f"{size} bytes of shared memory are needed, the host or its cgroup has "
                f"{max(0, free)} left; free memory or lower slots",
                metadata=self._numbers(size) | {"available_bytes": str(max(0, free))},
            )
        self.reserved += size
        self._untouched += size

    def touched(self, size: int) -> None:
        """Tell that `size` reserved bytes now are memory of the host."""
        self._untouched -= size

    def release(self, size: int, *, touched: bool = True) -> None:
        """Give `size` reserved bytes back."""
        self.reserved -= size
        if not touched:
            self._untouched -= size

    def _numbers(self, size: int) -> dict[str, str]:
        return {
            "needed_bytes": str(size),
            "reserved_bytes": str(self.reserved),
            "limit_bytes": str(self.limit),
        }
