"""Layouts that versions share, so that the next push need not send or check them again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.model.manifest import Layout

__all__ = ["KnownLayout", "KnownLayouts"]

_KEPT = 4


@dataclass(eq=False)
class KnownLayout:
    """A checked layout.

    Attributes:
        layout: The layout; one object for all versions that have it.
        headers: By shard index, the digest of header bytes that were checked against it.
    """

    layout: Layout
    headers: dict[int, bytes] = field(default_factory=dict)


class KnownLayouts:
    """The layouts used last, by digest."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, KnownLayout] = OrderedDict()

    def get(self, digest: str) -> KnownLayout | None:
        """Return the layout with this digest, if it is remembered."""
        return self._known.get(digest)

    def remember(self, layout: Layout) -> KnownLayout:
        """Return the remembered equal of `layout`. Its digest should have been computed before."""
        known = self._known.setdefault(layout.digest, KnownLayout(layout))
        self._known.move_to_end(layout.digest)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return known
