"""A PushWeights stream whose bytes another process writes into the segments.

An ingest process has the stream and asks for each shard; here everything is decided. Memory that it
was given is used for nothing else until it says that it has ended, or the kernel that it is gone.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.tensor_slices import SliceSpan
from weightsync.shm.segments import Segment
from weightsync_server.ops.tasks import to_end
from weightsync_server.push.sources.grpc_stream import UploadStream
from weightsync_server.push.state import check_open

if TYPE_CHECKING:
    from weightsync_server.push.messages import Message
    from weightsync_server.push.parts import Pushes
    from weightsync_server.push.shard_part import ShardPart


class Claim(NamedTuple):
    """The next bytes belong to a shard: may they be written?"""

    shard: int


class Grant(NamedTuple):
    """Permission to write a shard's bytes in order, from offset `received` to `size`.

    `size` is that of the shard or of what one of several writers sends of it. At `mark` received
    bytes the ingest process waits until it may go on; a chunk has at most `most` bytes. The bytes
    go to `spans`, one after the other, or to their own offsets without any.
    """

    segment: Segment
    received: int
    size: int
    mark: int
    most: int
    spans: Sequence[SliceSpan] = ()


class Written(NamedTuple):
    """All bytes of a shard up to `end` are written; `due`: the mark is reached."""

    shard: int
    end: int
    due: bool


class RemoteStream(ABC):
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
    def __init__(
        self, pushes: Pushes, distant: RemoteStream, deadline_s: float | None, who: str = ""
    ) -> None:
        # What is no message goes no further than _receive.
        super().__init__(pushes, cast("AsyncIterator[Message]", aiter(distant)), deadline_s, who)
        self._distant = distant
        #: What the ingest process may write now.
        self._granted: ShardPart | None = None

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
        part, segment = await self._claim(push, shard)
        await failpoints.reach("ingest.claim")
        check_open(push.state)
        # From here on the push is not taken apart before this process has let go.
        push.lifecycle.writers.add(self._distant)
        self._granted = part
        most = self._pushes.limits.max_chunk_bytes
        facts = segment, part.received, part.size, part.watermark, most, part.targets
        self._distant.grant(Grant(*facts))

    async def _wrote(self, wrote: Written) -> None:
        push = self._opened()
        check_open(push.state)
        part = self._granted
        if part is None or part.shard.index != wrote.shard:
            raise _nonsense(wrote)
        # What is complete is proved, or committed: nobody writes there any more.
        if part.complete or not part.received <= wrote.end <= part.size:
            raise _nonsense(wrote)
        failpoints.hit("ingest.wrote")
        self._received += wrote.end - part.received
        part.received_to(wrote.end)
        if wrote.due:
            await push.pipeline.advance(part)
            self._count()
            self._distant.go_on(part.watermark)

    async def _let_go(self) -> None:
        try:
            await to_end(asyncio.ensure_future(self._distant.cease()))
        finally:
            if self._push is not None:
                self._push.lifecycle.writers.discard(self._distant)


def _nonsense(wrote: Written) -> WeightSyncError:
    return WeightSyncError(
        Reason.FAULT,
        f"an ingest process reported bytes up to {wrote.end} of shard {wrote.shard}, which it was "
        "not assigned; report this fault",
    )
