"""What the server copies from a trainer's GPU by itself: whole shards and slices.

The driver believes a handle: one that was tampered with opens what is not there, and whoever reads
that has lost his device for good. A process of the server's own reads it first, and may die of it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.digest import DIGEST_BYTES
from weightsync.model.tensor_slices import SliceSpan
from weightsync.shm.incoming_version import HANDLE_BYTES, IpcAddresses
from weightsync.shm.same_host import MOST_PLACES
from weightsync.shm.segments import Segment
from weightsync_server.ops.metrics import Meters
from weightsync_server.ops.tasks import start_task
from weightsync_server.push.shard_part import PartFraming
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import refused
from weightsync_server.workers.fetch.fetch_api import GpuSource, StridedPiece

if TYPE_CHECKING:
    from weightsync_server.push.parts import Push
    from weightsync_server.push.shard_part import ShardPart, ShardState


logger = logging.getLogger(__name__)


_DEVICE = re.compile(r"[0-9a-f]{32}")
_HANDLE = re.compile(rf"[0-9a-f]{{{2 * HANDLE_BYTES}}}")


class GpuCopier(Protocol):
    """Copies from GPUs; `weightsync_server.workers.fetch.gpu_copy.GpuFetchPool` does."""

    async def collect(self, segment: Segment, source: GpuSource) -> None:
        """See `FetchApi.collect`."""


class GpuCopySession:
    """Copies the parts of one connection: slices, or files of which tensors are slices.

    `owner` owns the parts meanwhile. All connections share `places`: what engines may copy
    themselves.
    """

    def __init__(self, copier: GpuCopier, owner: object, places: Places, meters: Meters) -> None:
        self._copier = copier
        self._owner = owner
        self._places = places
        self._meters = meters
        self._trainer = secrets.token_hex(8)
        #: Devices from which something was copied.
        self._reached: set[str] = set()
        #: What was begun last, by shard.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def begin(self, push: Push, part: ShardPart, where: dict[str, Any]) -> str:
        """Begin to copy a part; return why its memory cannot be reached from here, else "".

        Raises:
            WeightSyncError: REQUEST_INVALID or SHARD_BUSY, with nothing changed; or why the push,
                or the first copy, has failed.
        """
        if part.framing is PartFraming.CHANGES:
            return "send what changed in boxes as chunks"
        spans, is_file = _spans(part), part.framing is PartFraming.FILE
        blocks = sum(span.block_count for span in spans)
        if blocks > MOST_PLACES:
            of_slices = f"the boxes are in {blocks} places of a shard"
            what = f"a shard of {blocks} tensors" if is_file else of_slices
            return f"{what}; at most {MOST_PLACES}"
        header = _header(part, where) if is_file else b""
        source = _source(self._trainer, part, spans, where)
        digests = _replicas(part, where)
        part.own(self._owner)
        segment = await push.pipeline.ready(part.shard)
        push.pipeline.begin_receive()
        segment.view[: len(header)] = header
        part.give(len(part.slices), digests)
        part.wants_digests = where.get("digests") is True
        if is_file:
            self._announce(push, part.shard, source)
        task = start_task(self._copied(push, part, segment, source))
        part.gpu_copy = self._tasks[part.shard.index] = task
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        declined = await self._declined(push, part.shard.index, source.device)
        if declined:
            part.release_copy()
        return declined

    def announce(self, push: Push, part: ShardPart, where: dict[str, Any]) -> None:
        """Take note of where a file lies for a later `begin`; a refusal changes nothing."""
        spans = _spans(part)
        if len(spans) <= MOST_PLACES:
            source = _source(self._trainer, part, spans, where)
            self._announce(push, part.shard, source)

    def _announce(self, push: Push, shard: ShardState, source: GpuSource) -> None:
        """Let engines know, if it was read from there before."""
        extents = _extents(source)
        if self._places.have(extents, _sizes(source)):
            push.announcement.announce_ipc(shard, extents)

    async def _declined(self, push: Push, shard: int, device: str) -> str:
        """Wait for the first copy from a device: what it meets, the others would.

        Returns why the device cannot be reached, and then the copy counts as not begun; else empty.
        """
        if device in self._reached:
            return ""
        try:
            await self._ended(push, shard)
        except WeightSyncError as error:
            if error.reason is not Reason.NOT_SUPPORTED:
                raise
            del self._tasks[shard]
            logger.info(
                "a trainer copies its tensors from the GPU by itself, because this server cannot: "
                "%s",
                error.message,
            )
            return error.message
        self._reached.add(device)
        return ""

    async def _ended(self, push: Push, shard: int) -> None:
        """Return once a shard was copied; raise why it was not, and first of all why the push."""
        task = self._tasks.get(shard)
        if task is None:
            raise refused(f"shard {shard} is not being copied; ask for that first")
        await asyncio.wait([task])
        check_open(push.state)
        task.result()

    async def _copied(
        self, push: Push, part: ShardPart, segment: Segment, source: GpuSource
    ) -> None:
        try:
            if part.framing is PartFraming.FILE:
                await self._copied_file(push, part, segment, source)
            else:
                await self._copier.collect(segment, source)
            check_open(push.state)
        except BaseException:
            # What comes in another way its writer digests.
            part.gpu_copy = None
            raise
        part.received_to(part.size)
        self._meters.add_received(part.size)
        await push.pipeline.advance(part)

    async def _copied_file(
        self, push: Push, part: ShardPart, segment: Segment, source: GpuSource
    ) -> None:
        extents, sizes = _extents(source), _sizes(source)
        try:
            await self._copier.collect(segment, source)
        except WeightSyncError:
            self._places.discard(extents, sizes)
            raise
        self._places.add(extents, sizes)
        check_open(push.state)
        push.announcement.announce_ipc(part.shard, extents)

    async def digests(self, push: Push, part: ShardPart) -> bytes:
        """Return the joined digests of a part once it was copied and its shard digested.

        Empty for slices unless the trainer asked.
        """
        shard, is_file = part.shard, part.framing is PartFraming.FILE
        await self._ended(push, shard.index)
        if not is_file and not part.wants_digests:
            return b""
        events = shard.digested, push.state.writers.met
        # The second is set when the push has failed, too.
        waited = [asyncio.create_task(event.wait()) for event in events]
        verification = shard.tasks.verification
        proof = [verification] if verification is not None else []
        try:
            await asyncio.wait([*waited, *proof], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waited:
                task.cancel()
        check_open(push.state)
        if shard.found is None and verification is not None and verification.done():
            verification.result()
        found = shard.found or () if is_file else part.digests[: len(part.slices)]
        return b"".join(digest or b"" for digest in found)

    async def end(self) -> None:
        """Call off what is under way, and return once nothing is written any more."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _spans(part: ShardPart) -> list[SliceSpan]:
    if part.framing is not PartFraming.FILE:
        return [span for span in part.spans if span.size]
    start, tensors = part.shard.entry.data_start, part.shard.tensors or ()
    return [
        SliceSpan(start + tensor.begin, tensor.end - tensor.begin, (), ())
        for tensor in tensors
        if tensor.end > tensor.begin
    ]


def _header(part: ShardPart, where: dict[str, Any]) -> bytes:
    try:
        header = bytes.fromhex(where["header"])
    except (KeyError, TypeError, ValueError):
        header = b""
    shard = part.shard
    if len(header) != shard.entry.data_start:
        raise refused(
            f"the header of shard {shard.index} has {len(header)} bytes, its layout declares "
            f"{shard.entry.data_start}"
        )
    return header


def _replicas(part: ShardPart, where: dict[str, Any]) -> bytes:
    try:
        digests = bytes.fromhex(where.get("replicas", ""))
    except (TypeError, ValueError):
        digests = b""
    if len(digests) != DIGEST_BYTES * len(part.replicas):
        raise refused(
            f"{len(part.replicas)} replicas of writer {part.writer} in shard {part.shard.index} "
            f"need as many digests of {DIGEST_BYTES} bytes; send them with the places"
        )
    return digests


def _source(
    trainer: str, part: ShardPart, spans: Sequence[SliceSpan], where: dict[str, Any]
) -> GpuSource:
    """Return where a part lies: checked for its form, and believed no further.

    `spans` are its tensors, or slices, that are not empty. `where` is what the trainer sent: the
    GPU's UUID and handles of open allocations, all hexadecimal, and for each span the index of its
    handle and its offset in bytes.
    """
    count = len(spans)
    device, handles, places = (where.get(key) for key in ("device", "handles", "places"))
    if not (
        isinstance(device, str)
        and _DEVICE.fullmatch(device)
        and isinstance(handles, list)
        and len(handles) <= count
        and all(isinstance(handle, str) and _HANDLE.fullmatch(handle) for handle in handles)
        and isinstance(places, list)
        and len(places) == count
        and all(_is_place(place, len(handles)) for place in places)
    ):
        raise refused(
            f"shard {part.shard.index} needs a device, handles of {HANDLE_BYTES} bytes, and for "
            f"each of its {count} tensors that are not empty a number of a handle and an offset"
        )
    pieces, strided = [], []
    for (handle, offset), span in zip(places, spans, strict=True):
        if span.counts:
            strided += [
                StridedPiece(handle, offset + begin, at, span.run, rows, span.strides[-1])
                for begin, at, rows in span.blocks()
            ]
        else:
            pieces.append((handle, offset, span.begin, span.size))
    return GpuSource(trainer, device, handles, pieces, strided)


def _is_place(place: object, handles: int) -> bool:
    # Not isinstance: true and false are no numbers here.
    if not isinstance(place, list) or [type(value) for value in place] != [int, int]:
        return False
    return bool(0 <= place[0] < handles and 0 <= place[1] < 1 << 63)


def _extents(source: GpuSource) -> IpcAddresses:
    return [(bytes.fromhex(source.handles[piece[0]]), piece[1]) for piece in source.pieces]


def _sizes(source: GpuSource) -> list[int]:
    return [size for *_, size in source.pieces]


#: Tensors of a few trainers of large models.
_MOST = 1 << 16

#: Handle, offset and size.
_Place = tuple[bytes, int, int]


class Places:
    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        #: In the order of their last reading.
        self._read: dict[_Place, None] = {}

    def add(self, where: IpcAddresses, sizes: Sequence[int]) -> None:
        """Take note that all of a shard was read; `sizes` are its tensors', in order of place."""
        for place in _each(where, sizes):
            self._read.pop(place, None)
            self._read[place] = None
        while len(self._read) > self._most:
            del self._read[next(iter(self._read))]

    def discard(self, where: IpcAddresses, sizes: Sequence[int]) -> None:
        for place in _each(where, sizes):
            self._read.pop(place, None)

    def have(self, where: IpcAddresses, sizes: Sequence[int]) -> bool:
        return all(place in self._read for place in _each(where, sizes))


def _each(where: IpcAddresses, sizes: Sequence[int]) -> Iterator[_Place]:
    for (handle, offset), size in zip(where, sizes, strict=True):
        yield handle, offset, size
