"""Whole shards into segments, through fetchers, and the proof of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.model.manifest import Layout, Manifest, TensorEntry
    from weightsync_server.residency.slot import Slot
    from weightsync_server.residency.slot_pool import SlotPool
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["compare", "first_difference", "load_shard"]


async def load_shard(
    slots: SlotPool, fetch: FetchApi, slot: Slot, layout: Layout, shard: int, source: int | str
) -> list[bytes]:
    """Read a file into the shard's segment and return the digests of its tensors."""
    entry = layout.shards[shard]
    segment = await slots.segment(slot, shard, entry.size)
    await fetch.load(source, entry.size, segment)
    return await fetch.digest(segment, entry)


def compare(manifest: Manifest, found: Sequence[Sequence[bytes]], where: str) -> None:
    """Refuse shards that do not hold what a manifest tells.

    Args:
        manifest: What they must hold.
        found: Digests of their tensors, shard by shard.
        where: Where they lie, for the sentence.

    Raises:
        WeightSyncError: DATA_CORRUPT, naming the first tensor that differs.
    """
    flat = [digest for digests in found for digest in digests]
    if len(flat) == len(manifest.digests):
        tensor = first_difference(manifest.layout.tensors, manifest.digests, flat)
        if tensor is None:
            return
        name = json.dumps(tensor.name[:100])
        raise WeightSyncError(
            Reason.DATA_CORRUPT, f"the bytes of tensor {name} {where} have another digest"
        )
    raise WeightSyncError(Reason.DATA_CORRUPT, f"the shards {where} hold other tensors")


def first_difference(
    tensors: Sequence[TensorEntry], expected: Sequence[bytes], found: Sequence[bytes]
) -> TensorEntry | None:
    """Return the first tensor whose digests differ, or None."""
    if list(expected) == list(found):
        return None
    for tensor, ours, theirs in zip(tensors, expected, found, strict=True):
        if ours != theirs:
            return tensor
    return None
