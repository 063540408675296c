"""A push gets what it needs before its first byte: a slot, memory, and a record of itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.faults import refusal
from weightsync_server.ingest.room import promise_room
from weightsync_server.store import PushRecord
from weightsync_server.versions import find_base

if TYPE_CHECKING:
    from weightsync_server.ingest.push import Push
    from weightsync_server.versions import ModelVersions, Slot, VersionRecord

__all__ = ["base_of", "equip", "start"]


async def start(push: Push, deadline_s: float | None) -> None:
    """Open a new push.

    Raises:
        WeightSyncError: NO_SLOT, MEMORY_EXHAUSTED, LAYOUT_INVALID, ...; the push has failed.
    """
    try:
        await equip(push, deadline_s)
        await _record(push)
    except asyncio.CancelledError:
        push.fail(WeightSyncError(Reason.PUSH_ABORTED, "its begin was cancelled"), "aborted")
        raise
    except Exception as error:
        told = refusal(error, f"opening the push of version {push.record.version}")
        push.fail(told)
        await push.closed()
        if told is error:
            raise
        raise told from error
    push.opened.set_result(None)


def base_of(versions: ModelVersions, request: pb.BeginPushRequest) -> VersionRecord | None:
    """Return the base of a delta, None of a full push.

    Raises:
        WeightSyncError: BASE_MISMATCH.
    """
    if request.kind != pb.PUSH_KIND_DELTA:
        return None
    return find_base(versions, request.base_content_digest, request.metadata.get("run_id", ""))


async def equip(push: Push, deadline_s: float | None) -> None:
    """Give a push its slot, the memory that it asked for and the layout that it named.

    Raises:
        WeightSyncError: NO_SLOT, MEMORY_EXHAUSTED, LAYOUT_INVALID, ...
    """
    await _slot(push, deadline_s)
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


async def _slot(push: Push, deadline_s: float | None) -> Slot:
    wait = push.limits.slot_wait_s
    if deadline_s is not None:
        # A little less than the caller waits, so that it is told why.
        wait = min(wait, max(0.0, deadline_s * 0.95 - 0.05))
    taking = asyncio.create_task(push.versions.pool.take(push.record, wait))
    either: list[asyncio.Future[Any]] = [taking, push.opened]
    try:
        # `opened` before its time means that the push failed: an epoch rose, it was aborted.
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not taking.done():
            taking.cancel()
            await asyncio.wait([taking])
    if push.error is not None:
        if not taking.cancelled() and taking.exception() is None:
            push.versions.pool.release(push.record)
        raise push.error
    return taking.result()
