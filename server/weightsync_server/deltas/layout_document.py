"""The canonical layout as fetchers read it: in shared memory, because messages are small."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from weightsync.shm.segments import Segment

if TYPE_CHECKING:
    from weightsync.model.manifest import Manifest
    from weightsync_server.residency.segments import SegmentAllocator
    from weightsync_server.residency.slot import Slot

__all__ = ["write_layout"]

_LENGTH_BYTES = 8


async def write_layout(scratch: Slot, keeper: SegmentAllocator, manifest: Manifest) -> Segment:
    """Return a segment of `scratch` with the layout of a manifest; written once per slot.

    Raises:
        WeightSyncError: MEMORY_EXHAUSTED.
    """
    if scratch.document is None:
        scratch.document = await keeper.write(partial(_segment, manifest))
    return scratch.document


def _segment(manifest: Manifest) -> Segment:
    body = manifest.to_json()
    segment = Segment.create(_LENGTH_BYTES + len(body))
    segment.fill(0, len(body).to_bytes(_LENGTH_BYTES, "little"))
    segment.fill(_LENGTH_BYTES, body)
    return segment
