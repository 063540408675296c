"""Boxes that the server copies from a writer's GPU by itself: nothing is lent for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.model.digest import DIGEST_BYTES
from weightsync.shm.same_host_server import MOST_PLACES
from weightsync_server.push.sources.gpu_copies import GpuCopies, placement
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused
from weightsync_server.workers.fetch.fetch_api import GpuSource, StridedPiece

if TYPE_CHECKING:
    from weightsync.model.box_spans import BoxSpan
    from weightsync.shm.segments import Segment
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.box_upload import BoxUpload
    from weightsync_server.push.parts import Push
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.sources.gpu_copies import GpuCopier, Placement

__all__ = ["BoxCopySession"]


class BoxCopySession:
    """Copies the boxes of one connection.

    Args:
        copier: Does the work.
        owner: Who owns the boxes meanwhile.
        meters: Counts bytes.
    """

    def __init__(self, copier: GpuCopier, owner: object, meters: Meters) -> None:
        self._copier = copier
        self._owner = owner
        self._meters = meters
        self._copies = GpuCopies()

    async def begin(
        self, push: Push, shard: ShardState, boxes: BoxUpload, where: dict[str, Any]
    ) -> str:
        """Begin to copy boxes; return why their memory cannot be reached from here, else "".

        Raises:
            WeightSyncError: REQUEST_INVALID, and nothing has changed; SHARD_BUSY; or why the push
                has failed, or the first copy from a device.
        """
        spans = [span for span in boxes.spans if span.size]
        blocks = sum(span.block_count for span in spans)
        if boxes.sends_changes:
            return "what changed in boxes is sent as chunks"
        if blocks > MOST_PLACES:
            return f"the boxes lie in {blocks} places of a shard; at most {MOST_PLACES}"
        found = placement(shard.index, len(spans), where)
        source = _source(self._copies.trainer, found, spans)
        digests = _replicas(boxes, where)
        boxes.own(self._owner)
        segment = await push.pipeline.ready(shard)
        push.pipeline.begin_receive()
        boxes.give(len(boxes.sent), digests)
        boxes.wants_digests = where.get("digests") is True
        # Nobody else may get the memory while something is written there.
        push.lifecycle.writers.add(self._copies)
        work = self._copied(push, shard, boxes, segment, source)
        boxes.gpu_copy = self._copies.start(shard.index, work)
        declined = await self._copies.declined(push, shard.index, found.device)
        if declined:
            boxes.owner, boxes.wants_digests = None, False
        return declined

    async def digests(self, push: Push, shard: ShardState, boxes: BoxUpload) -> bytes:
        """Return once boxes were copied, with their joined digests if the trainer asked for those.

        Digests are there once the whole shard was proved.

        Raises:
            WeightSyncError: REQUEST_INVALID where `begin` was not asked for; why it failed.
        """
        await self._copies.ended(push, shard.index)
        if not boxes.wants_digests:
            return b""
        waited = [asyncio.create_task(shard.digested.wait())]
        if push.state.writers is not None:
            # Set when the push has failed, too.
            waited.append(asyncio.create_task(push.state.writers.met.wait()))
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waited:
                task.cancel()
        check_open(push.state)
        return b"".join(digest or b"" for digest in boxes.given[: len(boxes.sent)])

    async def end(self, push: Push | None) -> None:
        """Call off what is under way, and return once nothing is written any more."""
        await self._copies.cease()
        if push is not None:
            push.lifecycle.writers.discard(self._copies)

    async def _copied(
        self,
        push: Push,
        shard: ShardState,
        boxes: BoxUpload,
        segment: Segment,
        source: GpuSource,
    ) -> None:
        await self._copier.collect(segment, source)
        check_open(push.state)
        # The trainer has read none of it.
        boxes.by_server = True
        boxes.received_to(boxes.size)
        self._meters.add_received(boxes.size)
        push.pipeline.advance_boxes(shard)


def _replicas(boxes: BoxUpload, where: dict[str, Any]) -> bytes:
    """Return the digests of the boxes that a lower writer sends."""
    try:
        digests = bytes.fromhex(where.get("replicas", ""))
    except (TypeError, ValueError):
        digests = b""
    if len(digests) != DIGEST_BYTES * len(boxes.replicas):
        raise refused(
            f"{len(boxes.replicas)} replicas of writer {boxes.writer} in shard {boxes.shard} need "
            f"as many digests of {DIGEST_BYTES} bytes; send them with the places"
        )
    return digests


def _source(trainer: str, found: Placement, spans: list[BoxSpan]) -> GpuSource:
    pieces, strided = [], []
    for (handle, offset), span in zip(found.places, spans, strict=True):
        if span.counts:
            strided += [
                StridedPiece(handle, offset + begin, at, span.run, rows, span.strides[-1])
                for begin, at, rows in span.blocks()
            ]
        else:
            pieces.append((handle, offset, span.begin, span.size))
    return GpuSource(trainer, found.device, found.handles, pieces, strided)
