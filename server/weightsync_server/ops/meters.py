"""What pushes count of themselves, and for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DeltaCounts", "Meters"]


class DeltaCounts(NamedTuple):
    """What is counted of a committed delta.

    Attributes:
        delta_bytes: Bytes of its shards.
        dense_bytes: Bytes that the version takes in full.
        fraction: Share of the elements that it told.
        codings: Tensors by coding, `unchanged` included.
    """

    delta_bytes: int
    dense_bytes: int
    fraction: float
    codings: Mapping[str, int]


class Meters(Protocol):
    """Counts pushes, bytes and durations. Called on the event loop; never blocks."""

    def observe_phase(self, phase: str, seconds: float) -> None:
        """Add one duration of `receive`, `digest`, `persist` or `patch`."""

    def count_push(self, outcome: str) -> None:
        """Count the end of a push: `committed`, `already`, `failed` or `aborted`."""

    def count_cast(self, tensors: int) -> None:
        """Count tensors that a trainer cast to what the engine holds."""

    def add_received(self, size: int) -> None:
        """Count received bytes."""

    def count_delta(self, counts: DeltaCounts) -> None:
        """Count a delta that was committed."""

    def count_fallback(self, reason: str) -> None:
        """Count a full push of a trainer that would have sent a delta, and why it did not."""
