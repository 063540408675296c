"""A push gets what it needs before its first byte: a slot, memory, and a record of itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.deltas import find_base
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.push.reservation import promise_room
from weightsync_server.store.store_records import PushRecord

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.model import ModelVersions
    from weightsync_server.push.lifecycle import Push

__all__ = ["base_of", "equip", "opened", "start"]


async def start(push: Push, deadline_s: float | None) -> None:
    """Open a new push. It goes on without this call while another one waits for it.

    Raises:
        WeightSyncError: NO_SLOT, MEMORY_EXHAUSTED, LAYOUT_INVALID, ...; the push has failed.
    """
    # The push ends it before it gives back what it works on.
    push.opening = asyncio.create_task(_open(push, deadline_s))
    # Whoever waits is told by the push.
    push.opening.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await opened(push)
    except WeightSyncError:
        await push.closed()
        raise


async def opened(push: Push) -> None:
    """Return when a push is open. It ends when every call that waited for that was cancelled.

    Raises:
        WeightSyncError: Why it failed.
    """
    push.awaiting += 1
    try:
        await asyncio.shield(push.opened)
    finally:
        push.awaiting -= 1
        if not push.awaiting and not push.opened.done():
            push.fail(WeightSyncError(Reason.PUSH_ABORTED, "its begin was cancelled"), "aborted")
    push.check_open()


def base_of(versions: ModelVersions, request: pb.BeginPushRequest) -> VersionRecord | None:
    """Return the base of a delta, None of a full push.

    Raises:
        WeightSyncError: BASE_MISMATCH.
    """
    if request.kind != pb.PUSH_KIND_DELTA:
        return None
    run_id = request.metadata.get("run_id", "")
    return find_base(versions.table, request.base_content_digest, run_id)


async def equip(push: Push, deadline_s: float | None) -> None:
    """Give a push its slot, the memory that it asked for and the layout that it named.

    Raises:
        WeightSyncError: NO_SLOT, MEMORY_EXHAUSTED, LAYOUT_INVALID, ...
    """
    await push.versions.pool.take(push.record, _slot_wait_s(push, deadline_s))
    known = None
    if push.request.layout_digest:
        known = await push.versions.layout(push.request.layout_digest)
        push.check_open()
    if push.delta is not None:
        await push.delta.equip()
        push.check_open()
    total = push.request.total_bytes or (known.layout.size if known else 0)
    await promise_room(push, total)
    push.check_open()
    if known is not None:
        push.layout.take_known(known)
        push.announce(known.layout)


async def _open(push: Push, deadline_s: float | None) -> None:
    try:
        await equip(push, deadline_s)
        await _record(push)
    except Exception as error:
        told = to_refusal(error, f"opening the push of version {push.record.version}")
        push.fail(told)
        if told is error:
            raise
        raise told from error
    push.opened.set_result(None)
    # Whoever waits may be cancelled before it hears of it: then the idle timeout ends the push.
    push.touch()


async def _record(push: Push) -> None:
    versions = push.versions
    if push.existing is not None or not versions.store.durable:
        # What it repeats is committed already; what the store does not keep cannot survive.
        return
    record, request = push.record, push.request.SerializeToString().hex()
    delta = push.delta is not None
    await versions.store.record_push(
        PushRecord(push.id, versions.name, record.version, record.epoch, request, delta)
    )
    push.check_open()
    push.recorded = True


def _slot_wait_s(push: Push, deadline_s: float | None) -> float:
    wait = push.limits.slot_wait_s
    if deadline_s is None:
        return wait
    # A little less than the caller waits, so that it is told why.
    return min(wait, max(0.0, deadline_s * 0.95 - 0.05))
