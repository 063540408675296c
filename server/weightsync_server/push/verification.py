"""The proof of a shard: its header tells its layout, its tensors have their digests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_header
from weightsync_server.push.coverage import check_boxes
from weightsync_server.push.segment_holders import holds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.push.box_upload import BoxUpload, TensorBox
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["check_arrived_header", "check_taken_back", "verify", "verify_boxes"]

#: Larger headers are parsed in a thread.
_INLINE_HEADER_BYTES = 32 << 10
#: How often it is looked whether a writer is left, and seconds between two looks.
_LOOKS, _LOOK_S = 20, 0.05
_EMPTY = tensor_digest(b"")


async def check_taken_back(
    shard: int, segment: Segment, uploads: Collection[BoxUpload] = ()
) -> None:
    """Prove that no trainer can write any more into a shard that all say is written.

    Args:
        shard: Its index.
        segment: Where it lies.
        uploads: What each of several writers brought of it.

    Raises:
        WeightSyncError: WRITER_LEFT, naming the writer where there are several.
    """
    # A process that the trainer forks has all its descriptors, until it runs another program.
    for _ in range(_LOOKS):
        if segment.taken_back():
            return
        await asyncio.sleep(_LOOK_S)
    if not segment.taken_back():
        # In a thread: a trainer may have tens of thousands of descriptors.
        writers = await asyncio.to_thread(_left, segment, uploads)
        who = " or ".join(f"writer {writer}" for writer in writers)
        metadata = {"writer": str(writers[0])} if len(writers) == 1 else {}
        raise WeightSyncError(
            Reason.WRITER_LEFT,
            f"shard {shard} was told as written, but {who or 'a process'} still holds its memory "
            "open for writing; close every descriptor and mapping first, and push the version "
            "again",
            metadata={"shard": str(shard), **metadata},
        )


def _left(segment: Segment, uploads: Collection[BoxUpload]) -> list[int]:
    """Return the writers that are seen to hold a segment, else all that were given it."""
    given = {upload.writer: upload.borrower for upload in uploads if upload.borrower is not None}
    seen = [writer for writer, borrower in given.items() if holds(borrower, segment.fd)]
    return sorted(seen or given)


async def check_arrived_header(
    shard: ShardState, segment: Segment, known: KnownLayout | None
) -> None:
    """Prove that the header in the segment tells exactly the shard's layout.

    Raises:
        WeightSyncError: SHARD_INVALID.
    """
    await failpoints.reach("receive.header")
    entry = shard.entry
    length = int.from_bytes(segment.view[:8], "little")
    if length != entry.header_size:
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"shard {shard.index} begins with a header of {length} bytes, its layout tells "
            f"{entry.header_size}",
        )
    header = bytes(segment.view[8 : entry.data_start])
    digest = shard.header_digest = tensor_digest(header)
    if known is not None and known.headers.get(shard.index) == digest:
        return
    tensors = shard.tensors or ()
    if len(header) > _INLINE_HEADER_BYTES:
        await asyncio.to_thread(check_header, header, tensors)
    else:
        check_header(header, tensors)


async def verify(fetch: FetchApi, shard: ShardState, segment: Segment) -> list[bytes]:
    """Return the digests of a shard's tensors, as they are in memory.

    Raises:
        WeightSyncError: DATA_CORRUPT; they were others before. FETCHER_FAILED, SHUTTING_DOWN.
    """
    found = await fetch.digest(segment, shard.entry)
    if shard.found not in (None, found):
        # Digested again because a write failed; the version may be staged with the first digests.
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            f"shard {shard.index} changed in shared memory; push the version again",
        )
    return found


async def verify_boxes(
    fetch: FetchApi, shard: ShardState, segment: Segment, found: list[bytes]
) -> None:
    """Prove that the boxes of all writers lie in memory as they have them, replicas too.

    Args:
        fetch: Digests them.
        shard: The shard; its writers' digests become those of its tensors.
        segment: Where it lies.
        found: Digests of its tensors.

    Raises:
        WeightSyncError: DIGEST_MISMATCH, naming writers. FETCHER_FAILED, SHUTTING_DOWN.
    """
    tensors, uploads = shard.tensors or (), list(shard.writers.boxes.values())
    digests, parts, spans = {}, [], []
    wanted = _wanted(uploads)
    for upload in uploads:
        for one, span in zip(upload.sent, upload.spans, strict=True):
            if one.box.sizes == tensors[one.tensor].shape:
                digests[one] = found[one.tensor]
            elif one.box.elements and one in wanted:
                parts.append(one)
                spans.append(span)
    if parts:
        of_parts = await fetch.digest_boxes(segment, shard.entry, spans)
        digests |= dict(zip(parts, of_parts, strict=True))
    await asyncio.to_thread(check_boxes, tensors, uploads, digests)
    for upload in uploads:
        if upload.wants_digests:
            upload.given[: len(upload.sent)] = [digests.get(one, _EMPTY) for one in upload.sent]
    if not any(upload.by_server for upload in uploads):
        # What the server has read by itself no trainer has digested.
        shard.given = list(found)


def _wanted(uploads: Iterable[BoxUpload]) -> set[TensorBox]:
    """Return the boxes of which a digest was given, or is to be answered."""
    wanted = set()
    for upload in uploads:
        declared = zip(upload.sent + upload.replicas, upload.given, strict=True)
        wanted |= {one for one, given in declared if given is not None}
        wanted |= set(upload.sent) if upload.wants_digests else set()
    return wanted
