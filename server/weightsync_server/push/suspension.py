"""A push that nobody sends any more gives its slot back, and goes on from the store if asked."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.state import Phase
from weightsync_server.push.task_set import is_running, start_task
from weightsync_server.store.store_records import ShardCheckpoint

if TYPE_CHECKING:
    from weightsync_server.push.parts import Push
    from weightsync_server.push.shard_state import ShardState

__all__ = ["suspend"]

logger = logging.getLogger(__name__)


def suspend(push: Push) -> None:
    """Begin to suspend a push that nobody uses, with nothing under way, and that the store keeps.

    It stays as it is when somebody has begun to use it meanwhile. What cannot be made durable is
    sent again, as after a crash of the server.
    """
    tasks = push.lifecycle.tasks
    if tasks.suspending is None and _is_possible(push):
        tasks.suspending = start_task(_suspend(push))


def _is_possible(push: Push) -> bool:
    state, record = push.state, push.state.record
    if push.lifecycle.phase not in (Phase.RECEIVING, Phase.SEALING) or not state.recorded:
        return False
    if state.writers is not None:
        # One that stands still ends it before that.
        return False
    if state.streams or push.lifecycle.awaiting or _is_busy(push):
        return False
    return not (record.awaited or push.model.orphans.use(record))


def _is_busy(push: Push) -> bool:
    shards, delta = push.state.shards.values(), push.state.delta
    tasks = [push.lifecycle.tasks.sealing, *(shard.tasks.allocation for shard in shards)]
    tasks += [task for shard in shards for task in shard.tasks.cancellable]
    return (delta is not None and delta.is_building_base) or any(map(is_running, tasks))


async def _suspend(push: Push) -> None:
    try:
        for shard in list(push.state.shards.values()):
            await push.checkpointer.save(shard)
        if _is_possible(push):
            _give_back(push)
    finally:
        push.lifecycle.tasks.suspending = None


def _give_back(push: Push) -> None:
    state, record = push.state, push.state.record
    checkpoints = [_checkpoint(state.shards[index]) for index in sorted(state.shards)]
    durable = {shard.index: shard for shard in checkpoints if shard is not None}
    push.announcement.end()
    push.layout.restart()
    push.pipeline.restart()
    push.reservation.renew()
    push.lifecycle.suspend(durable)
    record.manifest = None
    record.residency = pb.RESIDENCY_ABSENT
    push.model.slots.release(record)
    push.model.table.touch(record)
    logger.info(
        "nobody sends version %d any more: its slot is free, %d bytes are kept for its push",
        record.version,
        sum(shard.size for shard in durable.values()),
    )


def _checkpoint(shard: ShardState) -> ShardCheckpoint | None:
    if shard.tensors is None:
        return None
    size = shard.durable_bytes if shard.headed else 0
    return ShardCheckpoint(shard.index, shard.entry, shard.tensors, shard.header_digest, size)
