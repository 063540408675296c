"""A delta as it was pushed: what it is of, what it changes, what is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import DTYPE_BITS
from weightsync_server.ops.meters import DeltaCounts
from weightsync_server.store.store_records import DeltaFacts
from weightsync_server.workers.fetch.delta_summary import CODINGS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.model.manifest import Layout, Manifest, ShardEntry
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.workers.fetch.delta_summary import TensorDelta

__all__ = ["DeltaShard", "PushedDelta"]


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


@dataclass(frozen=True)
class PushedDelta:
    """A delta that was received and proved.

    Attributes:
        base: The version that it changes.
        manifest: Of its own shards.
        digests: Of all tensors of the new version, in the order of the base's layout.
        changed: Elements that it told; of a tensor that came densely, all.
        counts: What is counted of it.
        kept: The store keeps the delta; else it keeps the whole version, or nothing.
    """

    base: VersionRecord
    manifest: Manifest
    digests: tuple[bytes, ...]
    changed: int
    counts: DeltaCounts
    kept: bool

    @classmethod
    def merged(
        cls,
        base: VersionRecord,
        canonical: Manifest,
        manifest: Manifest,
        shards: Iterable[Iterable[TensorDelta]],
        *,
        kept: bool,
    ) -> PushedDelta:
        """Return what the shards of a delta tell together; takes time.

        Args:
            base: The version that it changes.
            canonical: Manifest of that version.
            manifest: Of the delta's own shards.
            shards: What each of them changes.
            kept: The store keeps the delta.

        Raises:
            WeightSyncError: SHARD_INVALID, for a tensor that two shards change.
        """
        layout, digests = canonical.layout, list(canonical.digests)
        codings = dict.fromkeys(("unchanged", *CODINGS), 0)
        codings["unchanged"] = len(layout.tensors)
        changed, seen = 0, set()
        for change in (change for changes in shards for change in changes):
            if change.tensor in seen:
                raise _twice(layout, change.tensor)
            seen.add(change.tensor)
            digests[change.tensor] = change.digest
            changed += change.changed
            codings[CODINGS[change.coding]] += 1
            codings["unchanged"] -= 1
        share = changed / max(1, _elements(layout))
        counts = DeltaCounts(manifest.layout.size, layout.size, share, codings)
        return cls(base, manifest, tuple(digests), changed, counts, kept)

    @property
    def facts(self) -> DeltaFacts:
        """What the commit record says of it."""
        base, counts = self.base, self.counts
        if not self.kept or base.commit is None:
            return DeltaFacts(self.changed, counts.fraction)
        digest = base.commit.content_digest
        return DeltaFacts(self.changed, counts.fraction, base.version, digest, counts.delta_bytes)


def touched(layout: Layout, changes: Iterable[TensorDelta]) -> frozenset[int]:
    """Return the canonical shards that hold changed tensors."""
    return frozenset(layout.tensors[change.tensor].shard for change in changes)


def _elements(layout: Layout) -> int:
    # As deltas count them: of a dtype below a byte, bytes.
    return sum((t.end - t.begin) * 8 // max(8, DTYPE_BITS[t.dtype]) for t in layout.tensors)


def _twice(layout: Layout, tensor: int) -> WeightSyncError:
    name = layout.tensors[tensor].name[:100]
    return WeightSyncError(
        Reason.SHARD_INVALID, f"tensor {name!a} is changed by two shards; push the version again"
    )
