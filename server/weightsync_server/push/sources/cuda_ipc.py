"""Shards that the server copies from a trainer's GPU by itself: nothing is lent for them.

The trainer tells where its tensors lie. What arrives is believed as little as what a stream brings.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync.errors import WeightSyncError
from weightsync.shm.same_host_server import MOST_PLACES
from weightsync_server.push.sources.gpu_copies import GpuCopies, placement
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused
from weightsync_server.workers.fetch.fetch_api import GpuSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.model.manifest import TensorEntry
    from weightsync.shm.incoming_version import IpcAddresses
    from weightsync.shm.segments import Segment
    from weightsync_server.ops.meters import Meters
    from weightsync_server.push.parts import Push
    from weightsync_server.push.shard_state import ShardState
    from weightsync_server.push.sources.gpu_copies import GpuCopier
    from weightsync_server.push.sources.ipc_opened import Places

__all__ = ["GpuCopySession"]


class GpuCopySession:
    """Copies the shards of one connection.

    Args:
        collector: Does the work.
        owner: Who owns the shards meanwhile.
        places: What engines may copy from themselves, of all connections.
        meters: Counts bytes.
    """

    def __init__(self, collector: GpuCopier, owner: object, places: Places, meters: Meters) -> None:
        self._collector = collector
        self._owner = owner
        self._places = places
        self._meters = meters
        self._copies = GpuCopies()

    async def begin(self, push: Push, upload: ShardState, where: dict[str, Any]) -> str:
        """Begin to copy a shard; return why its memory cannot be reached from here, else "".

        Raises:
            WeightSyncError: REQUEST_INVALID, and nothing has changed; SHARD_BUSY; or why the push
                has failed, or the first copy from a device.
        """
        filled = _filled(upload)
        if len(filled) > MOST_PLACES:
            return f"a shard of {len(filled)} tensors; at most {MOST_PLACES}"
        header, source = (
            _header(upload, where),
            _gpu_source(self._copies.trainer, upload, filled, where),
        )
        upload.own(self._owner)
        segment = await push.pipeline.ready(upload)
        push.pipeline.begin_receive()
        segment.view[: len(header)] = header
        self._announce(push, upload, source)
        work = self._collected(push, upload, segment, source)
        upload.copied_by(self._copies.start(upload.index, work))
        declined = await self._copies.declined(push, upload.index, source.device)
        if declined:
            upload.release_copy()
        return declined

    def announce(self, push: Push, upload: ShardState, where: dict[str, Any]) -> None:
        """Take note of where a shard lies for which `begin` will be asked.

        Raises:
            WeightSyncError: REQUEST_INVALID, and nothing has changed.
        """
        filled = _filled(upload)
        if len(filled) <= MOST_PLACES:
            self._announce(push, upload, _gpu_source(self._copies.trainer, upload, filled, where))

    def _announce(self, push: Push, upload: ShardState, source: GpuSource) -> None:
        """Let engines know, if it was read from there before."""
        extents = _extents(source)
        if self._places.have(extents, _sizes(source)):
            push.announcement.announce_ipc(upload, extents)

    async def _collected(
        self, push: Push, upload: ShardState, segment: Segment, source: GpuSource
    ) -> None:
        extents, sizes = _extents(source), _sizes(source)
        try:
            await self._collector.collect(segment, source)
        except WeightSyncError:
            self._places.discard(extents, sizes)
            raise
        self._places.add(extents, sizes)
        check_open(push.state)
        push.announcement.announce_ipc(upload, extents)
        upload.received_to(upload.entry.size)
        self._meters.add_received(upload.received)
        await push.pipeline.advance(upload, segment)

    async def digests(self, push: Push, upload: ShardState) -> bytes:
        """Return the joined digests of a shard once it was copied and digested.

        Raises:
            WeightSyncError: REQUEST_INVALID where `begin` was not asked for; why it failed.
        """
        await self._copies.ended(push, upload.index)
        digested = asyncio.create_task(upload.digested.wait())
        waited = (
            {digested}
            if upload.tasks.verification is None
            else {digested, upload.tasks.verification}
        )
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            digested.cancel()
        check_open(push.state)
        if upload.found is None and upload.tasks.verification is not None:
            upload.tasks.verification.result()
        return b"".join(upload.found or ())

    async def end(self) -> None:
        """Call off what is under way, and return once nothing is written any more."""
        await self._copies.cease()


def _filled(upload: ShardState) -> list[TensorEntry]:
    return [tensor for tensor in upload.tensors or () if tensor.end > tensor.begin]


def _header(upload: ShardState, where: dict[str, Any]) -> bytes:
    try:
        header = bytes.fromhex(where["header"])
    except (KeyError, TypeError, ValueError):
        header = b""
    if len(header) != upload.entry.data_start:
        raise refused(
            f"the header of shard {upload.index} has {len(header)} bytes, its layout tells "
            f"{upload.entry.data_start}"
        )
    return header


def _extents(source: GpuSource) -> IpcAddresses:
    return [(bytes.fromhex(source.handles[piece[0]]), piece[1]) for piece in source.pieces]


def _sizes(source: GpuSource) -> list[int]:
    return [size for *_, size in source.pieces]


def _gpu_source(
    trainer: str, upload: ShardState, filled: Sequence[TensorEntry], where: dict[str, Any]
) -> GpuSource:
    """Return where a shard lies: checked for its form, and believed no further."""
    found = placement(upload.index, len(filled), where)
    start = upload.entry.data_start
    pieces = [
        (place[0], place[1], start + tensor.begin, tensor.end - tensor.begin)
        for place, tensor in zip(found.places, filled, strict=True)
    ]
    return GpuSource(trainer, found.device, found.handles, pieces)
