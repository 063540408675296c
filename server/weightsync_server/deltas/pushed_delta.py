"""A delta as it was pushed: its base, what it changes, and the layout that fetchers read it by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.manifest import Layout, Manifest, ShardEntry
from weightsync.shm.segments import Segment
from weightsync_server.catalog.commits import CommittedDelta
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.ops.metrics import DeltaCounts
from weightsync_server.residency.slot import Slot
from weightsync_server.workers.fetch.fetch_api import CODINGS, TensorDelta

if TYPE_CHECKING:
    from weightsync_server.residency.segment_allocator import SegmentAllocator


class DeltaShard(NamedTuple):
    """One delta shard, proved, in a segment or a file, and the canonical shards it changes."""

    entry: ShardEntry
    source: Segment | str
    touches: frozenset[int]


@dataclass(frozen=True)
class PushedDelta(CommittedDelta):
    """A delta that was received and proved.

    `digests` are of all tensors of the new version, in the order of the base's layout.
    """

    digests: tuple[bytes, ...]

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

        `canonical` is the manifest of `base`, `manifest` that of the delta's own shards.
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
        return cls(base, manifest, changed, counts, kept, tuple(digests))


def touched(layout: Layout, changes: Iterable[TensorDelta]) -> frozenset[int]:
    return frozenset(layout.tensors[change.tensor].shard for change in changes)


def _elements(layout: Layout) -> int:
    # As deltas count them: of a dtype below a byte, bytes.
    return sum((t.end - t.begin) * 8 // max(8, DTYPE_BITS[t.dtype]) for t in layout.tensors)


def _twice(layout: Layout, tensor: int) -> WeightSyncError:
    name = layout.tensors[tensor].name[:100]
    return WeightSyncError(
        Reason.SHARD_INVALID, f"tensor {name!a} is changed by two shards; push the version again"
    )


_LENGTH_BYTES = 8


async def write_layout(scratch: Slot, keeper: SegmentAllocator, manifest: Manifest) -> Segment:
    """Return a segment of `scratch` with the layout of a manifest; written once per slot."""
    if scratch.document is None:
        scratch.document = await keeper.write(partial(_segment, manifest))
    return scratch.document


def _segment(manifest: Manifest) -> Segment:
    body = manifest.to_json()
    segment = Segment.create(_LENGTH_BYTES + len(body))
    segment.fill(0, len(body).to_bytes(_LENGTH_BYTES, "little"))
    segment.fill(_LENGTH_BYTES, body)
    return segment
