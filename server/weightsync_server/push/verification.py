"""The proof of a shard: its header tells its layout, its tensors have their digests."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_header
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.push.checkpoint import keep_rest
from weightsync_server.push.pipeline import proceed
from weightsync_server.push.reservation import stored_at

if TYPE_CHECKING:
    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.push.lifecycle import Push
    from weightsync_server.push.shard_state import ShardState

__all__ = ["check_arrived_header", "verify_shard"]

logger = logging.getLogger(__name__)

#: Larger headers are parsed in a thread.
_INLINE_HEADER_BYTES = 32 << 10


async def check_arrived_header(
    upload: ShardState, segment: Segment, known: KnownLayout | None
) -> None:
    """Prove that the header in the segment tells exactly the shard's layout.

    Raises:
        WeightSyncError: SHARD_INVALID.
    """
    await failpoints.reach("receive.header")
    entry = upload.entry
    length = int.from_bytes(segment.view[:8], "little")
    if length != entry.header_size:
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"shard {upload.index} begins with a header of {length} bytes, its layout tells "
            f"{entry.header_size}",
        )
    header = bytes(segment.view[8 : entry.data_start])
    digest = upload.header_digest = tensor_digest(header)
    if known is not None and known.headers.get(upload.index) == digest:
        return
    tensors = upload.tensors or ()
    if len(header) > _INLINE_HEADER_BYTES:
        await asyncio.to_thread(check_header, header, tensors)
    else:
        check_header(header, tensors)


async def verify_shard(push: Push, upload: ShardState, segment: Segment) -> None:
    """Digest a shard and make it durable; compare with the trainer's digests.

    A failure fails the push, but for that of a fetcher: the next commit tries again.
    """
    try:
        if not upload.headed:
            # The stream that brought the last bytes was cut before it came to that.
            await check_arrived_header(upload, segment, push.known)
            upload.headed = True
        digesting = asyncio.create_task(_digest(push, upload, segment))
        persisting = asyncio.create_task(_persist(push, upload, segment))
        try:
            await asyncio.gather(digesting, persisting)
        except BaseException:
            digesting.cancel()
            persisting.cancel()
            await asyncio.gather(digesting, persisting, return_exceptions=True)
            raise
    except WeightSyncError as error:
        if error.reason not in (Reason.FETCHER_FAILED, Reason.SHUTTING_DOWN):
            push.fail(error)
        raise
    except Exception as error:
        logger.exception("shard %d of version %d", upload.index, push.record.version)
        push.fail(to_refusal(error, f"verifying shard {upload.index}"))
        raise


async def _digest(push: Push, upload: ShardState, segment: Segment) -> None:
    started = time.perf_counter()
    found = await push.versions.fetchers.digest(segment, upload.entry)
    push.meters.observe_phase("digest", time.perf_counter() - started)
    if push.delta is not None:
        await push.delta.inspect(upload, segment)
    if upload.found not in (None, found):
        # Digested again because a write failed; the version may be staged with the first digests.
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"shard {upload.index} changed in shared memory; push the version again",
        )
    upload.found = found
    upload.compare()
    push.came(upload)
    upload.digested.set()
    proceed(push)


async def _persist(push: Push, upload: ShardState, segment: Segment) -> None:
    if not push.stores:
        return
    if push.recorded:
        await keep_rest(push, upload, segment)
        return
    entry, target = upload.entry, stored_at(push, upload)
    if target is not None:
        started = time.perf_counter()
        await push.versions.fetchers.persist(segment, entry.size, target)
        push.disk.wrote(entry.size)
        push.meters.observe_phase("persist", time.perf_counter() - started)
