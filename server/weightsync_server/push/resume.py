"""A push that survived a restart: suspended until its trainer asks for it, then read back."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about, event
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.ops.tasks import start_task
from weightsync_server.push.commit import answer
from weightsync_server.push.opening import base_of, equip, opened
from weightsync_server.push.progress import missing
from weightsync_server.push.state import check_open
from weightsync_server.store.store_records import OpenPush, ShardCheckpoint

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.opening import PushFactory
    from weightsync_server.push.parts import Push
    from weightsync_server.push.shard_part import ShardState


logger = logging.getLogger(__name__)


class RecoveredPushes:
    def __init__(self, model: Model, factory: PushFactory) -> None:
        self._model = model
        self._table = model.table
        self._epochs = model.epochs
        self._store = model.store
        self._factory = factory

    def committed(self, *, push_id: str = "", key: str = "") -> Push | None:
        """Return the push that brought a version that exists, by its id or key, as an ended one."""
        record = self._table.brought_by(push_id=push_id, key=key)
        commit = record.commit if record is not None else None
        if record is None or commit is None:
            return None
        request = pb.BeginPushRequest(idempotency_key=commit.idempotency_key)
        push = self._factory.make(record, request, push_id=commit.push_id)
        push.lifecycle.restore(answer(self._model, record, already=True))
        return push

    async def open(self) -> list[Push]:
        """Return the pushes that can still be committed, suspended; others are removed."""
        found = []
        for survivor in await self._store.open_pushes(self._table.name):
            record = survivor.record
            try:
                if record.epoch != self._epochs.newest:
                    raise self._epochs.stale(record.epoch)
                if record.version <= self._table.highest:
                    raise self._table.not_above(record.version)
                request = pb.BeginPushRequest.FromString(bytes.fromhex(record.request))
                if request.partial:
                    raise WeightSyncError(
                        Reason.PUSH_ABORTED, "its writers bring some tensors, and begin again"
                    )
                found.append(self._suspended(survivor, request))
            except WeightSyncError as error:
                logger.info(
                    "the push of version %d cannot continue: %s",
                    record.version,
                    error.message,
                    extra=event("push.dropped", version=record.version, push_id=record.push_id),
                )
                await self._store.discard(record.model, record.version)
        return found

    def _suspended(self, survivor: OpenPush, request: pb.BeginPushRequest) -> Push:
        written = survivor.record
        record = VersionRecord(
            self._table.name, written.version, written.epoch, dict(request.metadata)
        )
        record.name_trace(written.traceparent)
        base = base_of(self._model, request)
        push = self._factory.make(record, request, push_id=written.push_id, base=base)
        push.lifecycle.recover({shard.index: shard for shard in survivor.shards})
        record.wait_for(partial(missing, push.state))
        self._table.add(record)
        push.lifecycle.touch()
        size = sum(shard.size for shard in survivor.shards)
        logger.info(
            "the push of version %d continues: %d bytes were kept",
            written.version,
            size,
            extra=event("push.resumed", **push.state.facts),
        )
        return push


async def resume(push: Push, deadline_s: float | None = None) -> None:
    """Return when a push can go on; one that was suspended begins to be read back, or stays so."""
    tasks = push.lifecycle.tasks
    check_open(push.state)
    if tasks.suspending is not None:
        await asyncio.wait([tasks.suspending])
        check_open(push.state)
    if push.state.suspended is not None and tasks.resuming is None:
        with about(**push.state.facts):
            tasks.resuming = start_task(_resume(push, deadline_s))
    if (resuming := tasks.resuming) is not None:
        # Not its own cancellation is what callers are told, but why the push ended.
        await asyncio.wait([resuming])
        check_open(push.state)
        resuming.result()
    await opened(push)


async def loaded(push: Push) -> None:
    """Return when it is known which of the bytes that were kept are undamaged."""
    each = (shard.tasks.restore for shard in push.state.shards.values())
    tasks = [task for task in each if task is not None]
    if tasks:
        await asyncio.wait(tasks)
    check_open(push.state)


async def _resume(push: Push, deadline_s: float | None) -> None:
    try:
        await failpoints.reach("receive.resume")
        await equip(push, deadline_s)
        for shard in push.lifecycle.resume().values():
            _take_up(push, shard)
    except BaseException as error:
        await _stay_suspended(push)
        if not isinstance(error, Exception):
            raise
        refusal = to_refusal(error, "resuming a push")
        if push.state.suspended is None:
            push.lifecycle.fail(refusal)
        if refusal is error:
            raise
        raise refusal from error
    push.lifecycle.open()


async def _stay_suspended(push: Push) -> None:
    state = push.state
    if state.delta is not None:
        await state.delta.cease()
    if state.suspended is not None and state.error is None:
        push.model.slots.release(state.record)
    # Last of all: who resumes it again gives it another slot.
    push.lifecycle.tasks.resuming = None


def _take_up(push: Push, checkpoint: ShardCheckpoint) -> None:
    shard = push.layout.take(checkpoint.index, checkpoint.entry, checkpoint.tensors)
    if shard is None:
        logger.warning("what was kept of shard %d no longer matches its layout", checkpoint.index)
        return
    # Of what several writers bring, shards are kept whole.
    if not checkpoint.size or (push.state.writers.several and not checkpoint.is_whole):
        return
    shard.resume(checkpoint.header_digest, checkpoint.size)
    push.checkpointer.set_watermark(shard)
    shard.tasks.restore = asyncio.create_task(_restore(push, shard))


async def _restore(push: Push, shard: ShardState) -> Segment:
    segment = await push.pipeline.allocated(shard)
    # Its file was reserved whole in the server's earlier life.
    push.reservation.disk.wrote(shard.entry.size)
    source = push.reservation.target(shard)
    good = 0
    try:
        good = await push.model.fetch.restore(segment, shard.entry, source or "")
    except WeightSyncError as error:
        if error.reason is Reason.SHUTTING_DOWN:
            raise
        logger.warning(
            "shard %d of a push that continues has to be sent from its beginning: %s",
            shard.index,
            error.message,
        )
    durable = shard.durable_bytes
    if good < durable:
        logger.warning(
            "shard %d of a push that continues has to be sent again from byte %d on: the bytes "
            "after that, of %d that were kept, are damaged",
            shard.index,
            good,
            durable,
        )
        shard.go_back(good)
        push.checkpointer.set_watermark(shard)
    if shard.arrived:
        # Several writers tell their digests of it again, with which it is compared.
        push.pipeline.verify(shard)
    return segment
