"""How fast the link is, and so whether a delta is packed with zstd."""

from __future__ import annotations

from weightsync.wire.addresses import is_private

__all__ = ["LinkSpeed"]

#: Bytes per second below which zstd saves more time than it takes: both sides together, on one
#: core, between 110 and 270 MB/s at 1 to 30 % of changes.
_SLOW = 150e6
#: A shorter transfer says more of its beginning than of the link.
_LEAST_BYTES = 8 << 20


class LinkSpeed:
    """Measures pushes in full; those of deltas mostly wait for their encoder.

    Args:
        address: Of the server. Nothing is slow that does not leave this host.
    """

    def __init__(self, address: str) -> None:
        self._near = is_private(address)
        self._bytes_per_s: float | None = None

    def note(self, sent: int, seconds: float) -> None:
        """Take a transfer into account; the latest one counts."""
        if sent >= _LEAST_BYTES and seconds > 0:
            self._bytes_per_s = sent / seconds

    @property
    def slow(self) -> bool:
        """Whether bytes cost more than the time to pack them."""
        measured = self._bytes_per_s
        return not self._near and measured is not None and measured < _SLOW
