"""A push that survived a restart: asleep until its trainer asks for it, then read back."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.push.checkpoint import next_mark
from weightsync_server.push.commit import answer
from weightsync_server.push.lifecycle import Push
from weightsync_server.push.opening import base_of, equip, opened
from weightsync_server.push.progress import missing
from weightsync_server.push.reservation import stored_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import ModelVersions
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.limits import PushLimits
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.store.store_records import OpenPush, ShardCheckpoint

__all__ = ["RecoveredPushes", "loaded", "wake"]

logger = logging.getLogger(__name__)


class RecoveredPushes:
    """Finds the pushes of an earlier life of the server.

    Args:
        versions: The registry of a model.
        limits: Bounds on each push.
        meters: Counts.
        on_end: Called when a push has ended.
    """

    def __init__(
        self,
        versions: ModelVersions,
        limits: PushLimits,
        meters: Meters,
        on_end: Callable[[Push], None],
    ) -> None:
        self._versions = versions
        self._limits = limits
        self._meters = meters
        self._on_end = on_end

    def committed(self, *, push_id: str = "", key: str = "") -> Push | None:
        """Return the push that brought a version which exists, by its id or key, as an ended one.

        None: the registry has no such version.
        """
        record = self._versions.brought_by(push_id=push_id, key=key)
        commit = record.commit if record is not None else None
        if record is None or commit is None:
            return None
        request = pb.BeginPushRequest(idempotency_key=commit.idempotency_key)
        push = self._made(record, request, commit.push_id)
        push.opened.set_result(None)
        push.committed = answer(record, durable=self._versions.store.durable, already=True)
        return push

    async def open(self) -> list[Push]:
        """Return the pushes that can still be committed, asleep; others are removed."""
        found = []
        for survivor in await self._versions.store.open_pushes(self._versions.name):
            record = survivor.record
            try:
                if record.epoch != self._versions.epoch:
                    raise self._versions.epochs.stale(record.epoch)
                if record.version <= self._versions.highest:
                    raise self._versions.not_above(record.version)
                found.append(self._asleep(survivor))
            except WeightSyncError as error:
                logger.info(
                    "the push of version %d cannot go on: %s", record.version, error.message
                )
                await self._versions.store.discard(record.model, record.version)
        return found

    def _asleep(self, survivor: OpenPush) -> Push:
        told = survivor.record
        request = pb.BeginPushRequest.FromString(bytes.fromhex(told.request))
        record = self._versions.unlisted(told.version, told.epoch, dict(request.metadata))
        base = base_of(self._versions, request)
        push = self._made(record, request, told.push_id)
        push.based_on(base)
        push.asleep = {shard.index: shard for shard in survivor.shards}
        push.recorded = True
        record.missing = partial(missing, push)
        self._versions.enlist(record)
        push.touch()
        size = sum(shard.size for shard in survivor.shards)
        logger.info("the push of version %d goes on: %d bytes were kept", told.version, size)
        return push

    def _made(self, record: VersionRecord, request: pb.BeginPushRequest, push_id: str) -> Push:
        push = Push(self._versions, record, request, self._limits, self._meters, self._on_end)
        push.rename(push_id)
        return push


async def wake(push: Push, deadline_s: float | None = None) -> None:
    """Return when a push can go on; one that was asleep begins to be read back.

    Raises:
        WeightSyncError: NO_SLOT, MEMORY_EXHAUSTED; it sleeps on. Or why it has failed.
    """
    push.check_open()
    if push.sleeping is not None:
        await asyncio.wait([push.sleeping])
        push.check_open()
    if push.asleep is not None and push.waking is None:
        push.waking = asyncio.create_task(_wake(push, deadline_s))
        push.waking.add_done_callback(lambda task: task.cancelled() or task.exception())
    if (waking := push.waking) is not None:
        # Not its own cancellation is what callers are told, but why the push ended.
        await asyncio.wait([waking])
        push.check_open()
        waking.result()
    await opened(push)


async def loaded(push: Push) -> None:
    """Return when it is known which of the bytes that were kept are undamaged."""
    tasks = [upload.restoring for upload in push.shards.values() if upload.restoring is not None]
    if tasks:
        await asyncio.wait(tasks)
    push.check_open()


async def _wake(push: Push, deadline_s: float | None) -> None:
    try:
        await failpoints.reach("receive.resume")
        await equip(push, deadline_s)
        shards, push.asleep = push.asleep or {}, None
        for shard in shards.values():
            _take_up(push, shard)
    except BaseException as error:
        await _fall_asleep(push)
        if not isinstance(error, Exception):
            raise
        told = to_refusal(error, "resuming a push")
        if push.asleep is None:
            push.fail(told)
        if told is error:
            raise
        raise told from error
    push.opened.set_result(None)
    # Whoever asked may be gone.
    push.touch()


async def _fall_asleep(push: Push) -> None:
    if push.delta is not None:
        await push.delta.cease()
    if push.asleep is not None and push.error is None:
        push.versions.pool.release(push.record)
    # Last of all: who wakes it again gives it another slot.
    push.waking = None


def _take_up(push: Push, shard: ShardCheckpoint) -> None:
    upload = push.layout.take(shard.index, shard.entry, shard.tensors)
    if upload is None:
        logger.warning("what was kept of shard %d is not of its layout any more", shard.index)
        return
    if not shard.size:
        return
    upload.headed = True
    upload.header_digest = shard.header_digest
    upload.received = upload.kept = shard.size
    upload.mark = next_mark(push, upload)
    upload.restoring = asyncio.create_task(_restore(push, upload))


async def _restore(push: Push, upload: ShardState) -> Segment:
    segment = await push.allocated(upload)
    # Its file was reserved whole in the server's earlier life.
    push.disk.wrote(upload.entry.size)
    source = stored_at(push, upload)
    good = 0
    try:
        good = await push.versions.fetchers.restore(segment, upload.entry, source or "")
    except WeightSyncError as error:
        if error.reason is Reason.SHUTTING_DOWN:
            raise
        logger.warning("shard %d starts again: %s", upload.index, error.message)
    if good < upload.kept:
        logger.warning("of %d kept bytes of shard %d %d are whole", upload.kept, upload.index, good)
        _go_back(push, upload, good)
    if upload.complete:
        push.verify(upload, segment)
    return segment


def _go_back(push: Push, upload: ShardState, good: int) -> None:
    upload.headed = good >= upload.entry.data_start
    upload.received = upload.kept = good if upload.headed else 0
    upload.mark = next_mark(push, upload) if upload.headed else upload.entry.data_start
