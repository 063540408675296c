"""Received bytes are made durable behind the receive, so that a crash of the server costs few."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.push.reservation import stored_at

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment
    from weightsync_server.push.lifecycle import Push
    from weightsync_server.push.shard_state import ShardState

__all__ = ["keep_received", "keep_rest", "keep_up", "next_mark"]

logger = logging.getLogger(__name__)

#: Failures of the fetchers, not of the push: the next step tries again.
_PASSING = frozenset({Reason.FETCHER_FAILED, Reason.SHUTTING_DOWN})


async def keep_up(push: Push, upload: ShardState, segment: Segment) -> None:
    """Begin to make what came durable where it is worth it, and set the mark for the next time.

    Returns at once, unless so much is not durable yet that a crash would lose too much.
    """
    if not push.recorded:
        upload.mark = upload.entry.size
        return
    if upload.keeping is None or upload.keeping.done():
        upload.keeping = asyncio.create_task(_keep_up(push, upload, segment))
    if upload.received - upload.kept > push.limits.loss_bytes - push.limits.keep_bytes:
        await asyncio.wait([upload.keeping])
        push.check_open()
    upload.mark = next_mark(push, upload)


def next_mark(push: Push, upload: ShardState) -> int:
    """Return the number of received bytes at which `keep_up` is worth it again."""
    return min(upload.received + push.limits.keep_bytes, upload.entry.size)


async def keep_rest(push: Push, upload: ShardState, segment: Segment) -> None:
    """Make a whole shard durable.

    Raises:
        WeightSyncError: DISK_EXHAUSTED, FAULT, FETCHER_FAILED, SHUTTING_DOWN.
    """
    if upload.keeping is not None:
        await asyncio.wait([upload.keeping])
    while upload.kept < upload.entry.size:
        await _keep(push, upload, segment)


async def keep_received(push: Push, upload: ShardState) -> None:
    """Make all that came of a shard durable; what cannot be made so is logged."""
    segment = upload.segment
    if segment is None or not upload.headed:
        return
    try:
        while upload.kept < upload.received:
            await _keep(push, upload, segment)
    except WeightSyncError as error:
        logger.warning("shard %d is kept up to byte %d: %s", upload.index, upload.kept, error)


async def _keep_up(push: Push, upload: ShardState, segment: Segment) -> None:
    try:
        while upload.received - upload.kept >= push.limits.keep_bytes and not upload.complete:
            await _keep(push, upload, segment)
    except WeightSyncError as error:
        if error.reason not in _PASSING:
            push.fail(error)


async def _keep(push: Push, upload: ShardState, segment: Segment) -> None:
    target = stored_at(push, upload)
    if target is None:
        raise WeightSyncError(Reason.FAULT, "this store keeps no shards; use another store")
    with translate_os_errors(f"keeping shard {upload.index}"):
        await failpoints.reach("receive.keep")
    begin, end, started = upload.kept, upload.received, time.perf_counter()
    await push.versions.fetchers.keep(segment, upload.entry, begin, end, target)
    upload.kept = end
    if begin == 0:
        # The first bytes reserve the whole file.
        push.disk.wrote(upload.entry.size)
    push.meters.observe_phase("persist", time.perf_counter() - started)
