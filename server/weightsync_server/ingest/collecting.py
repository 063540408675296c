"""Shards that the server copies from a trainer's GPU by itself: nothing is lent for them.

The trainer tells where its tensors lie. What arrives is believed as little as what a stream brings.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Protocol

from weightsync import failpoints
from weightsync.device_memory import HANDLE_BYTES
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ingest.checks import refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.segments import Segment
    from weightsync_server.fetchers.asking import Piece
    from weightsync_server.ingest.push import Push
    from weightsync_server.ingest.upload import ShardUpload

__all__ = ["Collecting", "Collects"]

_DEVICE = re.compile(r"[0-9a-f]{32}")
_HANDLE = re.compile(rf"[0-9a-f]{{{2 * HANDLE_BYTES}}}")
#: With more, what a fetcher is told would be too long a message.
_MOST_TENSORS = 2048


class Collects(Protocol):
    """Copies from GPUs; `weightsync_server.fetchers.collector.Collector` does."""

    async def collect(
        self, segment: Segment, device: str, handles: Sequence[str], pieces: Sequence[Piece]
    ) -> None:
        """See `weightsync_server.fetchers.asking.Asking.collect`."""


class Collecting:
    """Copies the shards of one connection.

    Args:
        collector: Does the work.
        owner: Who owns the shards meanwhile.
    """

    def __init__(self, collector: Collects, owner: object) -> None:
        self._collector = collector
        self._owner = owner
        self._reached = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, push: Push, upload: ShardUpload, where: dict[str, Any]) -> str:
        """Begin to copy a shard; return why its memory cannot be reached from here, else "".

        Raises:
            WeightSyncError: REQUEST_INVALID; or why the push has failed.
        """
        header, pieces = _header(upload, where), _pieces(upload, where)
        if len(pieces) > _MOST_TENSORS:
            return f"a shard of {len(pieces)} tensors; at most {_MOST_TENSORS}"
        await failpoints.reach("receive.collect")
        upload.own(self._owner)
        segment = await push.ready(upload)
        if not push.first_byte_at:
            push.first_byte_at = asyncio.get_running_loop().time()
        segment.view[: len(header)] = header
        order = self._collector.collect(segment, where["device"], where["handles"], pieces)
        task = asyncio.create_task(_collected(push, upload, segment, order))
        upload.collecting = task
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return "" if self._reached else await self._reach(upload, task)

    async def _reach(self, upload: ShardUpload, task: asyncio.Task[None]) -> str:
        """Wait for the first one: what it meets, the others would."""
        try:
            await asyncio.shield(task)
        except WeightSyncError as error:
            if error.reason is not Reason.NOT_SUPPORTED:
                raise
            upload.collecting = upload.owner = None
            return error.message
        self._reached = True
        return ""

    async def digests(self, push: Push, upload: ShardUpload) -> bytes:
        """Return the joined digests of a shard once it was copied and digested.

        Raises:
            WeightSyncError: REQUEST_INVALID where `begin` was not asked for; why it failed.
        """
        if upload.collecting is None:
            raise refused(f"shard {upload.index} is not being copied; ask for that first")
        await asyncio.shield(upload.collecting)
        digested = asyncio.create_task(upload.digested.wait())
        waited = {digested} if upload.verification is None else {digested, upload.verification}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            digested.cancel()
        push.check_open()
        if upload.found is None and upload.verification is not None:
            upload.verification.result()
        return b"".join(upload.found or ())

    async def end(self) -> None:
        """Call off what is under way, and return once nothing is written any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieved: the trainer may never ask.
            task.exception()


async def _collected(push: Push, upload: ShardUpload, segment: Segment, order: Any) -> None:
    await order
    push.check_open()
    upload.received = upload.entry.size
    push.meters.add_received(upload.received)
    await push.advance(upload, segment)


def _header(upload: ShardUpload, where: dict[str, Any]) -> bytes:
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


def _pieces(upload: ShardUpload, where: dict[str, Any]) -> list[Piece]:
    device, handles, places = (where.get(key) for key in ("device", "handles", "places"))
    filled = [tensor for tensor in upload.tensors or () if tensor.end > tensor.begin]
    told = (
        isinstance(device, str)
        and _DEVICE.fullmatch(device)
        and isinstance(handles, list)
        and len(handles) <= len(filled)
        and all(isinstance(handle, str) and _HANDLE.fullmatch(handle) for handle in handles)
        and isinstance(places, list)
        and len(places) == len(filled)
        and all(_is_place(place, len(handles)) for place in places)
    )
    if not told:
        raise refused(
            f"shard {upload.index} needs a device, handles of {HANDLE_BYTES} bytes, and for each "
            f"of its {len(filled)} tensors that are not empty a number of a handle and an offset"
        )
    start = upload.entry.data_start
    return [
        (place[0], place[1], start + tensor.begin, tensor.end - tensor.begin)
        for place, tensor in zip(where["places"], filled, strict=True)
    ]


def _is_place(place: object, handles: int) -> bool:
    match place:
        case [int(number), int(offset)]:
            return 0 <= number < handles and 0 <= offset < 1 << 63
    return False
