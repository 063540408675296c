"""How to make a version out of what is at hand: the cheapest way, chosen without doing anything."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BuildStart", "ChainLink", "Plan", "plan"]

#: What a byte costs, against one that is copied in memory: read from a disk and, of a delta,
#: unpacked and scattered (1 % of changes take 0.7 copies of the whole, and 0.6 % of its bytes).
_LOAD, _PATCH = 4, 100


class BuildStart(enum.Enum):
    """Where the first bytes come from."""

    #: They lie in the slot, left there by an earlier version.
    IN_PLACE = enum.auto()
    #: From the slot of another version.
    COPY = enum.auto()
    #: From the store.
    LOAD = enum.auto()


class ChainLink(NamedTuple):
    """One version of a chain.

    Attributes:
        manifest_digest: Its identity, encoding included.
        size: Its bytes in full.
        delta_bytes: Bytes of its delta shards; 0: it is kept in full.
        resident: It lies in another slot, proved.
        readable: What the store keeps of it can be read.
    """

    manifest_digest: str
    size: int
    delta_bytes: int
    resident: bool
    readable: bool


class Plan(NamedTuple):
    """A way to make the first version of a chain.

    Attributes:
        start: Where the first bytes come from.
        at: Place in the chain of the version that they are; it and all before it down to the first
            are patched on top, so at 0 nothing is.
    """

    start: BuildStart
    at: int


def plan(chain: Sequence[ChainLink], remains: str) -> Plan | None:
    """Return the cheapest way to make the first version of a chain; None: there is none.

    Args:
        chain: The version, what it is based on, and so on to one that is kept in full.
        remains: Manifest digest of what the slot still holds; empty: nothing.
    """
    ways: list[tuple[int, int, Plan]] = []
    patches = 0
    for at, link in enumerate(chain):
        if link.manifest_digest == remains:
            ways.append((patches, len(ways), Plan(BuildStart.IN_PLACE, at)))
        if link.resident:
            ways.append((patches + link.size, len(ways), Plan(BuildStart.COPY, at)))
        if not link.readable:
            break
        if not link.delta_bytes:
            ways.append((patches + _LOAD * link.size, len(ways), Plan(BuildStart.LOAD, at)))
            break
        patches += _PATCH * link.delta_bytes
    return min(ways)[2] if ways else None
