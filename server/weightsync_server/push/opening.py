"""A push gets what it needs before its first byte: a slot, memory, and a record of itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.deltas import find_base
from weightsync_server.push.part_bases import part_base
from weightsync_server.push.state import check_open
from weightsync_server.store.store_records import PushRecord

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import Model
    from weightsync_server.push.limits import PushLimits
    from weightsync_server.push.parts import Push

__all__ = ["base_of", "equip", "opened", "start"]


async def start(push: Push, deadline_s: float | None) -> None:
    """Open a new push. It goes on without this call while another one waits for it.

    Raises:
        WeightSyncError: NO_SLOT, MEMORY_EXHAUSTED, LAYOUT_INVALID, ...; the push has failed.
    """
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
    """Return when a push is open. It ends when every call that waited for that was cancelled.

    Raises:
        WeightSyncError: Why it failed.
    """
    life = push.lifecycle
    try:
        with life.awaited():
            await asyncio.shield(life.opened)
    finally:
        if not life.awaiting and not life.opened.done():
            life.fail(WeightSyncError(Reason.PUSH_ABORTED, "its begin was cancelled"), "aborted")
    check_open(push.state)


def base_of(model: Model, request: pb.BeginPushRequest) -> VersionRecord | None:
    """Return the base of a delta or of a part; None of a full push.

    Also of one whose writers send changes: these have each their own.

    Raises:
        WeightSyncError: BASE_MISMATCH, VERSION_UNKNOWN.
    """
    if request.partial:
        return part_base(model, request)
    if request.kind != pb.PUSH_KIND_DELTA or request.writers > 1:
        return None
    run_id = request.metadata.get("run_id", "")
    return find_base(model.table, request.base_content_digest, run_id)


async def equip(push: Push, deadline_s: float | None) -> None:
    """Give a push its slot, the memory that it asked for and the layout that it named.

    Raises:
        WeightSyncError: NO_SLOT, MEMORY_EXHAUSTED, LAYOUT_INVALID, ...
    """
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


async def _record(push: Push) -> None:
    state, model = push.state, push.model
    if state.existing is not None or not model.store.durable:
        # What it repeats is committed already; what the store does not keep cannot survive.
        return
    record, request = state.record, state.request.SerializeToString().hex()
    # Of some tensors the store keeps a delta alone, which is not what the writers send.
    resumable = not state.request.partial
    delta = state.delta is not None and resumable
    opened = PushRecord(state.id, record.model, record.version, record.epoch, request, delta)
    try:
        await model.store.record_push(opened)
    except WeightSyncError as error:
        model.epochs.doubt(error)
        raise
    check_open(state)
    # In any case it is written down, so that other servers leave it alone.
    if resumable:
        push.lifecycle.mark_resumable()


def _slot_wait_s(limits: PushLimits, deadline_s: float | None) -> float:
    wait = limits.slot_wait_s
    if deadline_s is None:
        return wait
    # A little less than the caller waits, so that it is told why.
    return min(wait, max(0.0, deadline_s * 0.95 - 0.05))
