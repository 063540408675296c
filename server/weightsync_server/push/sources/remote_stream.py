"""A PushWeights stream whose bytes another process writes into the segments.

An ingest process has the stream and asks for each shard; here everything is decided and known. What
it may write ends where it says so, or where the kernel says that it is gone: before that, nothing
of the memory that it was given is used for anything else.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, cast

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.tasks import to_end
from weightsync_server.push.sources.grpc_stream import UploadStream
from weightsync_server.push.state import check_open

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from weightsync.model.box_spans import BoxSpan
    from weightsync.shm.segments import Segment
    from weightsync_server.push.box_upload import BoxUpload
    from weightsync_server.push.messages import Message
    from weightsync_server.push.parts import Pushes
    from weightsync_server.push.shard_state import ShardState

__all__ = ["Claim", "DistantStream", "Grant", "RemoteStream", "Written"]


class Claim(NamedTuple):
    """The next bytes belong to a shard: may they be written?"""

    shard: int


class Grant(NamedTuple):
    """They may, from `received` to `size` and in order.

    Attributes:
        segment: The memory.
        received: Offset of the first byte that is not here.
        size: Of the shard, or of what one of several writers sends of it.
        mark: Number of received bytes at which to wait until it is told to go on.
        most: Bytes of the largest chunk.
        spans: Where the bytes go, one after the other; none: to their offsets.
    """

    segment: Segment
    received: int
    size: int
    mark: int
    most: int
    spans: Sequence[BoxSpan] = ()


class Written(NamedTuple):
    """All bytes of a shard up to `end` are written; `due`: the mark is reached."""

    shard: int
    end: int
    due: bool


class _Granted(NamedTuple):
    """What an ingest process may write now, and how many bytes there are of it."""

    shard: int
    upload: ShardState | BoxUpload
    size: int


class RemoteStream(ABC):
    """The ingest process at the other end of a stream."""

    @abstractmethod
    def __aiter__(self) -> AsyncIterator[Message | Claim | Written]:
        """Yield what comes, in order; what is no plain chunk comes whole."""

    @abstractmethod
    def grant(self, grant: Grant) -> None:
        """Answer a claim."""

    @abstractmethod
    def go_on(self, mark: int) -> None:
        """Answer what was due; the next mark is this."""

    @abstractmethod
    async def cease(self) -> None:
        """Return when it writes no more, and never will for this stream."""


class DistantStream(UploadStream):
    """Serves one stream of an ingest process.

    Args:
        pushes: Where pushes are begun and found.
        distant: The ingest process.
        deadline_s: Seconds left to the call, if it has a deadline.
    """

    def __init__(self, pushes: Pushes, distant: RemoteStream, deadline_s: float | None) -> None:
        # What is no message goes no further than _receive.
        super().__init__(pushes, cast("AsyncIterator[Message]", aiter(distant)), deadline_s)
        self._distant = distant
        self._granted: _Granted | None = None

    async def _receive(self) -> Message | None:
        while True:
            message: Message | Claim | Written | None = await super()._receive()
            if isinstance(message, Claim):
                await self._grant(message.shard)
            elif isinstance(message, Written):
                await self._wrote(message)
            else:
                return message

    async def _grant(self, shard: int) -> None:
        push = self._opened()
        upload: ShardState | BoxUpload
        spans: Sequence[BoxSpan] = ()
        if push.state.writers is None:
            upload, segment = await self._claim(push, shard)
            size = upload.entry.size
        else:
            upload, segment = await self._claim_boxes(push, shard)
            size, spans = upload.size, () if upload.sends_changes else upload.spans
        await failpoints.reach("ingest.claim")
        check_open(push.state)
        # From here on the push is not taken apart before this process has let go.
        push.lifecycle.writers.add(self._distant)
        self._granted = _Granted(shard, upload, size)
        most = self._pushes.limits.max_chunk_bytes
        facts = segment, upload.received, size, upload.watermark, most, spans
        self._distant.grant(Grant(*facts))

    async def _wrote(self, wrote: Written) -> None:
        push = self._opened()
        check_open(push.state)
        granted = self._granted
        if granted is None or granted.shard != wrote.shard:
            raise _nonsense(wrote)
        upload = granted.upload
        # What is complete is proved, or committed: nobody writes there any more.
        if upload.complete or not upload.received <= wrote.end <= granted.size:
            raise _nonsense(wrote)
        failpoints.hit("ingest.wrote")
        self._received += wrote.end - upload.received
        upload.received_to(wrote.end)
        if wrote.due:
            await self._advance(push, upload)
            self._count()
            self._distant.go_on(upload.watermark)

    async def _let_go(self) -> None:
        try:
            await to_end(asyncio.ensure_future(self._distant.cease()))
        finally:
            if self._push is not None:
                self._push.lifecycle.writers.discard(self._distant)


def _nonsense(wrote: Written) -> WeightSyncError:
    return WeightSyncError(
        Reason.FAULT,
        f"an ingest process told of bytes up to {wrote.end} of shard {wrote.shard}, which it was "
        "not given; report this fault",
    )
