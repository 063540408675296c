"""Room for a shard before its bytes come: on the store's disk, then in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment
    from weightsync_server.push.lifecycle import Push
    from weightsync_server.push.shard_state import ShardState

__all__ = ["make_room", "promise_room", "stored_at"]


async def promise_room(push: Push, total: int) -> None:
    """Reserve disk and memory for `total` bytes of shards; 0: not known yet.

    Raises:
        WeightSyncError: DISK_EXHAUSTED, MEMORY_EXHAUSTED; or why the push has failed meanwhile.
    """
    if push.stores:
        await push.disk.promise(total)
    await push.versions.pool.promise(push.place, total)


def stored_at(push: Push, upload: ShardState) -> str | None:
    """Return the path at which the store keeps a shard; None: it keeps none."""
    versions, delta = push.versions, push.delta is not None
    return versions.store.shard_target(
        versions.name, push.record.version, upload.index, delta=delta
    )


async def make_room(push: Push, upload: ShardState, total: int) -> Segment:
    """Return the segment for a shard, the disk having room for `total` bytes of the push.

    Raises:
        WeightSyncError: DISK_EXHAUSTED, MEMORY_EXHAUSTED; or why the push has failed meanwhile.
    """
    if push.stores:
        await push.disk.promise(total)
    return await push.versions.pool.segment(push.place, upload.index, upload.entry.size)
