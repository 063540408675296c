"""What a push tells of itself: what has come, what has not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from weightsync_server.push.lifecycle import Push
    from weightsync_server.store.store_records import ShardCheckpoint

__all__ = ["missing", "progress", "status"]

_NAMED = 10


def missing(push: Push, shard_count: int = 0) -> list[str]:
    """Return what has not arrived, at most ten items and how many more."""
    count = shard_count or push.shard_count or max(push.shards, default=-1) + 1
    items = []
    for index in range(count):
        upload = push.shards.get(index)
        if upload is None or upload.tensors is None:
            items.append(f"the layout and bytes of shard {index}")
        elif not upload.complete:
            gone = upload.received
            items.append(f"shard {index} from byte {gone} of {upload.entry.size} on")
    if not items and not push.shards:
        items = ["all shards"]
    if not items and push.declared_bytes < push.total_bytes:
        items = [f"{push.total_bytes - push.declared_bytes} of total_bytes"]
    if len(items) > _NAMED:
        items[_NAMED:] = [f"{len(items) - _NAMED} more"]
    return items


def progress(push: Push) -> list[pb.ShardProgress]:
    """Return how far every shard has come whose layout is here."""
    if push.told is not None:
        return push.told
    if push.asleep is not None:
        return [_slept(push.asleep[index]) for index in sorted(push.asleep)]
    uploads = [push.shards[index] for index in sorted(push.shards)]
    return [upload.progress() for upload in uploads if upload.tensors is not None]


def status(push: Push) -> pb.PushStatus:
    """Return the push as GetStatus tells it."""
    return pb.PushStatus(
        push_id=push.id,
        version=push.record.version,
        received_bytes=sum(shard.received_bytes for shard in progress(push)),
        declared_bytes=max(push.declared_bytes, push.total_bytes),
        streams=push.streams,
        layout_check=push.record.layout_check,
    )


def _slept(shard: ShardCheckpoint) -> pb.ShardProgress:
    return pb.ShardProgress(
        shard=shard.index,
        received_bytes=shard.size,
        size_bytes=shard.entry.size,
        durable_bytes=shard.size,
    )
