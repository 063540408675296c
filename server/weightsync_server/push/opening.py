"""A push gets what it needs before its first byte; one that nobody sends is suspended."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about, event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.deltas import find_base
from weightsync_server.ops.metrics import Meters
from weightsync_server.ops.tasks import is_running, start_task
from weightsync_server.push.delta_push import DeltaPush
from weightsync_server.push.layout_parts import PushLayout
from weightsync_server.push.lifecycle import PushLifecycle
from weightsync_server.push.partial_push import PartPush, part_base
from weightsync_server.push.parts import Push
from weightsync_server.push.pipeline import Checkpointer, ShardPipeline
from weightsync_server.push.progress import PushAnnouncement, has_all, is_reading_back, received
from weightsync_server.push.reservation import PushReservation
from weightsync_server.push.slice_changes import SliceBases
from weightsync_server.push.slice_parts import PushSlices
from weightsync_server.push.state import Phase, PushState, check_open
from weightsync_server.push.writers import PushWriters
from weightsync_server.store.store_records import PushRecord, ShardCheckpoint

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.push.push_settings import PushSettings
    from weightsync_server.push.shard_part import ShardState


logger = logging.getLogger(__name__)


async def start(push: Push, deadline_s: float | None) -> None:
    """Open a new push. It goes on without this call while another one waits for it."""
    # The push ends it before it gives back what it works on.
    push.lifecycle.tasks.opening = push.pipeline.start(
        _open(push, deadline_s), f"opening the push of version {push.state.record.version}"
    )
    try:
        await opened(push)
    except WeightSyncError:
        await push.lifecycle.closed()
        raise


async def opened(push: Push) -> None:
    """Return when a push is open. It ends when every call that waited for that was cancelled."""
    life = push.lifecycle
    try:
        with life.awaited():
            await asyncio.shield(life.opened)
    finally:
        if not life.awaiting and not life.opened.done():
            life.fail(WeightSyncError(Reason.PUSH_ABORTED, "its begin was cancelled"), "aborted")
    check_open(push.state)


def base_of(model: Model, request: pb.BeginPushRequest) -> VersionRecord | None:
    """Return the base of a delta or of a part.

    None if it is in full, or its writers send changes, each of its own base.
    """
    if request.partial:
        return part_base(model, request)
    if request.kind != pb.PUSH_KIND_DELTA or request.writers > 1:
        return None
    run_id = request.metadata.get("run_id", "")
    return find_base(model.table, request.base_content_digest, run_id)


async def equip(push: Push, deadline_s: float | None) -> None:
    state, model = push.state, push.model
    await model.slots.take(state.record, _slot_wait_s(push.limits, deadline_s))
    known = None
    if state.request.layout_digest and state.delta is None:
        known = await model.commits.layout(state.request.layout_digest)
        check_open(state)
    if state.delta is not None:
        await state.delta.equip()
        check_open(state)
    total = state.request.total_bytes or (known.layout.size if known else 0)
    await push.reservation.reserve(total)
    check_open(state)
    if known is not None:
        push.layout.take_known(known)
        push.announcement.begin(known.layout)


async def _open(push: Push, deadline_s: float | None) -> None:
    await equip(push, deadline_s)
    await _record(push)
    push.lifecycle.open()
    logger.debug("push of version %d begins", push.state.record.version, extra=event("push.begun"))


async def _record(push: Push) -> None:
    state, model = push.state, push.model
    if state.existing is not None or not model.store.durable:
        # What it repeats is committed already; what the store does not keep cannot survive.
        return
    record, request = state.record, state.request.SerializeToString().hex()
    # Of some tensors the store keeps a delta alone, which is not what the writers send.
    resumable = not state.request.partial
    delta = state.delta is not None and resumable
    opened = PushRecord(
        state.id,
        record.model,
        record.version,
        record.epoch,
        request,
        delta,
        traceparent=record.traceparent,
    )
    try:
        await model.store.record_push(opened)
    except WeightSyncError as error:
        model.epochs.doubt(error)
        raise
    check_open(state)
    # In any case it is written down, so that other servers leave it alone.
    if resumable:
        push.lifecycle.mark_resumable()


def _slot_wait_s(limits: PushSettings, deadline_s: float | None) -> float:
    wait = limits.slot_wait_s
    if deadline_s is None:
        return wait
    # A little less than the caller waits, so that it is told why.
    return min(wait, max(0.0, deadline_s * 0.95 - 0.05))


def suspend(push: Push) -> None:
    """Begin to suspend a push that nobody uses, with nothing under way, and that the store keeps.

    It goes on if somebody uses it meanwhile. What cannot be made durable is sent again, as after a
    crash of the server.
    """
    tasks = push.lifecycle.tasks
    if tasks.suspending is None and _is_possible(push):
        with about(**push.state.facts):
            tasks.suspending = start_task(_suspend(push))


def _is_possible(push: Push) -> bool:
    state, record = push.state, push.state.record
    if push.lifecycle.phase not in (Phase.RECEIVING, Phase.SEALING) or not state.recorded:
        return False
    if state.writers.several:
        # One that stands still ends it before that.
        return False
    if state.streams or push.lifecycle.awaiting or _is_busy(push):
        return False
    return not (record.awaited or push.model.orphans.use(record))


def _is_busy(push: Push) -> bool:
    shards, delta = push.state.shards.values(), push.state.delta
    tasks = [push.lifecycle.tasks.sealing, *(shard.tasks.allocation for shard in shards)]
    tasks += [task for shard in shards for task in shard.cancellable]
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
    record.evict()
    push.model.slots.release(record)
    push.model.table.touch(record)
    logger.info(
        "no writer has sent version %d for a while: its slot is freed, %d bytes are kept for "
        "its push",
        record.version,
        sum(shard.size for shard in durable.values()),
        extra=event("push.suspended"),
    )


def _checkpoint(shard: ShardState) -> ShardCheckpoint | None:
    if shard.tensors is None:
        return None
    size = shard.durable_bytes if shard.headed else 0
    return ShardCheckpoint(shard.index, shard.entry, shard.tensors, shard.header_digest, size)


class PushFactory:
    """Makes the pushes of one model; `on_end` is called once one has ended and freed everything."""

    def __init__(
        self,
        model: Model,
        limits: PushSettings,
        meters: Meters,
        on_end: Callable[[Push], None],
    ) -> None:
        self._model = model
        self._limits = limits
        self._meters = meters
        self._on_end = on_end

    def make(
        self,
        record: VersionRecord,
        request: pb.BeginPushRequest,
        who: str = "",
        *,
        push_id: str = "",
        existing: VersionRecord | None = None,
        base: VersionRecord | None = None,
    ) -> Push:
        """Return a push that has nothing yet.

        An empty `push_id` stands for a new id. `existing` is the version that it repeats, or the
        live one that failed to commit. `base` is the version that it changes, or keeps tensors of;
        None: the push is in full.
        """
        push_id = push_id or secrets.token_hex(16)
        record.name_push(push_id, request.idempotency_key)
        state = PushState(push_id, who, request, record, existing)
        state.shard_count = request.shard_count
        if base is not None:
            facts = self._model, record, base, self._meters
            state.delta = (
                PartPush(*facts, request.total_bytes, request.shard_count)
                if request.partial
                else DeltaPush(*facts)
            )
            # It has the tensors of its base.
            record.check_layout(base.layout_check)
        return self._assembled(state)

    def _assembled(self, state: PushState) -> Push:
        model, limits, meters = self._model, self._limits, self._meters
        reservation = PushReservation(state, model.store, model.slots, model.disk)
        announcement = PushAnnouncement(state, model)
        checkpointer = Checkpointer(reservation, model.fetch, limits, meters)
        bases = SliceBases(state, model)

        def end() -> None:
            push.layout.clear()
            push.slices.clear()
            bases.close()
            self._on_end(push)

        lifecycle = PushLifecycle(
            state,
            model.orphans,
            limits,
            meters,
            reservation,
            announcement,
            suspend=lambda: suspend(push),
            on_end=end,
        )
        pipeline = ShardPipeline(
            state, lifecycle, reservation, checkpointer, announcement, model, meters
        )
        state.writers = PushWriters(
            max(state.request.writers, 1),
            limits.writer_timeout_s,
            partial(received, state),
            partial(has_all, state),
            partial(is_reading_back, state),
            lambda error: lifecycle.fail(error, "aborted"),
        )
        push = Push(
            state,
            lifecycle,
            pipeline,
            PushLayout(state, reservation, model, limits, pipeline),
            PushSlices(state, limits, bases, pipeline),
            bases,
            reservation,
            checkpointer,
            announcement,
            model,
            limits,
        )
        return push
