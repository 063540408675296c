"""A delta as it was pushed: what it is of, what it changes, what is told of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.delta.coding import element_width, total_bytes
from weightsync_server.changes import CODINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightsync.manifest import Layout, Manifest, ShardEntry
    from weightsync.segments import Segment
    from weightsync_server.changes import Change
    from weightsync_server.versions.records import VersionRecord

__all__ = ["DeltaCounts", "DeltaShard", "PushedDelta"]


class DeltaShard(NamedTuple):
    """One delta shard, proved, and where its bytes are.

    Attributes:
        entry: Its sizes in bytes.
        source: Its segment, or the path of its file.
        touches: Canonical shards that it changes.
    """

    entry: ShardEntry
    source: Segment | str
    touches: frozenset[int]


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


@dataclass(frozen=True)
class PushedDelta:
    """A delta that was received and proved.

    Attributes:
        base: The version that it changes.
        manifest: Of its own shards.
        layout: The canonical layout, that of the base.
        changes: The changed tensors by place in the layout.
        kept: The store keeps the delta; else it keeps the whole version, or nothing.
    """

    base: VersionRecord
    manifest: Manifest
    layout: Layout
    changes: Mapping[int, Change]
    kept: bool

    @property
    def changed(self) -> int:
        """Elements that it told; of a tensor that came densely, all."""
        return sum(change.changed for change in self.changes.values())

    @property
    def fraction(self) -> float:
        """Their share of all elements."""
        return self.changed / max(1, elements(self.layout))

    @property
    def facts(self) -> dict[str, Any]:
        """What the commit record tells of it."""
        found: dict[str, Any] = {
            "changed_elements": self.changed,
            "changed_fraction": self.fraction,
        }
        if self.kept:
            commit = self.base.commit
            found["base_version"] = self.base.version
            found["base_content_digest"] = commit.content_digest if commit else ""
            found["delta_bytes"] = self.manifest.layout.size
        return found

    def digests(self, base: Sequence[bytes]) -> list[bytes]:
        """Return the digests of all tensors of the new version, given those of the base."""
        found = list(base)
        for place, change in self.changes.items():
            found[place] = change.digest
        return found

    def counts(self) -> DeltaCounts:
        """Return what is counted."""
        codings = Counter(CODINGS[change.coding] for change in self.changes.values())
        codings["unchanged"] = len(self.layout.tensors) - len(self.changes)
        size = self.manifest.layout.size
        return DeltaCounts(size, self.layout.size, self.fraction, codings)


def elements(layout: Layout) -> int:
    """Return the elements of all tensors, as deltas count them."""
    return sum(total_bytes(t.dtype, t.shape) // element_width(t.dtype) for t in layout.tensors)


def touched(layout: Layout, changes: Iterable[Change]) -> frozenset[int]:
    """Return the canonical shards that hold changed tensors."""
    return frozenset(layout.tensors[change.tensor].shard for change in changes)
