"""A push that nobody sends any more gives its slot back, and goes on from the store if asked."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.checkpoint import keep_received
from weightsync_server.push.layout_parts import PushLayout
from weightsync_server.store.store_records import ShardCheckpoint

if TYPE_CHECKING:
    from weightsync_server.push.lifecycle import Push
    from weightsync_server.push.shard_state import ShardState

__all__ = ["may_sleep", "sleep"]

logger = logging.getLogger(__name__)


def may_sleep(push: Push) -> bool:
    """Tell whether nobody uses a push, nothing is under way in it, and the store can keep it."""
    over = push.error is not None or push.committed is not None or push.committing is not None
    if over or not push.recorded or push.asleep is not None or not push.opened.done():
        return False
    if push.streams or push.awaiting or _busy(push):
        return False
    record = push.record
    return not (record.awaited or push.versions.orphans.use(record))


async def sleep(push: Push) -> None:
    """Make what came durable, then give the push's memory and slot back, unless it is in use again.

    What cannot be made durable is sent again, as after a crash of the server.
    """
    try:
        for upload in list(push.shards.values()):
            await keep_received(push, upload)
        if may_sleep(push):
            _give_back(push)
    finally:
        push.sleeping = None


def _busy(push: Push) -> bool:
    tasks = [push.sealing, *(upload.allocation for upload in push.shards.values())]
    tasks += [task for upload in push.shards.values() for task in upload.working]
    laying = push.delta is not None and push.delta.busy
    return laying or any(task is not None and not task.done() for task in tasks)


def _give_back(push: Push) -> None:
    uploads = [push.shards[index] for index in sorted(push.shards)]
    asleep = [_kept(upload) for upload in uploads]
    push.asleep = {shard.index: shard for shard in asleep if shard is not None}
    push.quiet()
    push.shards, push.known, push.sealing, push.waking = {}, None, None, None
    push.layout = PushLayout(push)
    push.shard_count, push.declared_bytes = push.request.shard_count, 0
    push.first_byte_at = push.last_byte_at = 0.0
    push.opened = asyncio.get_running_loop().create_future()
    push.disk.close()
    push.disk = push.versions.disk.share()
    if (delta := push.delta) is not None:
        push.based_on(push.record.base)
        delta.end()
    push.record.manifest = None
    push.record.residency = pb.RESIDENCY_ABSENT
    push.versions.pool.release(push.record)
    push.versions.changed(push.record)
    size = sum(shard.size for shard in push.asleep.values())
    logger.info(
        "nobody sends version %d any more: its slot is free, %d bytes are kept for its push",
        push.record.version,
        size,
    )


def _kept(upload: ShardState) -> ShardCheckpoint | None:
    if upload.tensors is None:
        return None
    size = upload.kept if upload.headed else 0
    return ShardCheckpoint(upload.index, upload.entry, upload.tensors, upload.header_digest, size)
