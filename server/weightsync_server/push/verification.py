"""The proof of a shard: its header tells its layout, its tensors have their digests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.boxes import box_name
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_header
from weightsync_server.ops.tasks import all_done
from weightsync_server.push.coverage import check_boxes
from weightsync_server.workers.fetch.fetch_api import PatchOrder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from weightsync.shm.segments import Segment
    from weightsync_server.catalog.layout_cache import KnownLayout
    from weightsync_server.push.box_upload import BoxUpload, TensorBox
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.workers.fetch.fetch_api import FetchApi

__all__ = ["check_arrived_header", "check_taken_back", "lay_patches", "verify", "verify_boxes"]

#: Larger headers are parsed in a thread.
_INLINE_HEADER_BYTES = 32 << 10
#: How often it is looked whether a writer is left, and seconds between two looks.
_LOOKS, _LOOK_S = 20, 0.05
_EMPTY = tensor_digest(b"")
#: What changes that are wrong in themselves show themselves as.
_WRONG = frozenset({Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH, Reason.LAYOUT_INVALID})


async def check_taken_back(shard: int, segment: Segment) -> None:
    """Prove that no trainer can write any more into a shard that all say is written.

    Raises:
        WeightSyncError: WRITER_LEFT.
    """
    # A process that the trainer forks has all its descriptors, until it runs another program.
    for _ in range(_LOOKS):
        if segment.taken_back():
            return
        await asyncio.sleep(_LOOK_S)
    if not segment.taken_back():
        raise WeightSyncError(
            Reason.WRITER_LEFT,
            f"shard {shard} was told as written, but a process still holds its memory open for "
            "writing; close every descriptor and mapping first, and push the version again",
            metadata={"shard": str(shard)},
        )


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


async def lay_patches(fetch: FetchApi, shard: ShardState, segment: Segment) -> None:
    """Make the boxes of writers of those of their bases, where they sent what changed in them.

    Raises:
        WeightSyncError: SHARD_INVALID, DIGEST_MISMATCH, naming a writer. FETCHER_FAILED,
            SHUTTING_DOWN.
    """
    uploads = sorted(shard.writers.boxes.values(), key=lambda upload: upload.writer)
    seen: set[TensorBox] = set()
    laid = []
    for upload in uploads:
        # A box that several send is laid once: two that change it at a time make neither.
        laid.append(_lay_patch(fetch, shard, upload, segment, frozenset(seen)))
        seen |= set(upload.sent)
    await all_done(laid)


async def _lay_patch(
    fetch: FetchApi,
    shard: ShardState,
    upload: BoxUpload,
    segment: Segment,
    skipped: AbstractSet[TensorBox],
) -> None:
    patch, tensors = upload.patch, shard.tensors or ()
    if patch is None:
        return
    kinds: dict[str, tuple[str, Sequence[int]]] = {}
    boxes = []
    for one, span in zip(upload.sent, upload.spans, strict=True):
        tensor = tensors[one.tensor]
        name = box_name(tensor.name, one.box)
        kinds[name] = tensor.dtype, one.box.sizes
        if one not in skipped:
            boxes.append((name, span))
    order = PatchOrder(patch.size, patch.base_content_digest, kinds, boxes)
    try:
        await fetch.patch_boxes(segment, patch.base, patch.segment, order)
    except WeightSyncError as error:
        if error.reason not in _WRONG:
            raise
        raise WeightSyncError(
            error.reason,
            f"the changes of writer {upload.writer} in shard {shard.index}: {error.message}",
            metadata={"writer": str(upload.writer)},
        ) from error
    patch.discard()
    upload.patch = None


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
        if upload.answered:
            upload.given[: len(upload.sent)] = [digests.get(one, _EMPTY) for one in upload.sent]
    if not any(upload.copied for upload in uploads):
        # What the server has read by itself no trainer has digested.
        shard.given = list(found)


def _wanted(uploads: Iterable[BoxUpload]) -> set[TensorBox]:
    """Return the boxes of which a digest was given, or is to be answered."""
    wanted = set()
    for upload in uploads:
        declared = zip(upload.sent + upload.replicas, upload.given, strict=True)
        wanted |= {one for one, given in declared if given is not None}
        wanted |= set(upload.sent) if upload.answered else set()
    return wanted
