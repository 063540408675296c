"""One PushWeights stream: the hot path from messages into segments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segments import Segment
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.lifecycle import FATAL
from weightsync_server.push.messages import ChunkView
from weightsync_server.push.resume import resume
from weightsync_server.push.state import check_open
from weightsync_server.push.validation import check_size, refused

if TYPE_CHECKING:
    from weightsync_server.push.messages import Message
    from weightsync_server.push.parts import Push, Pushes
    from weightsync_server.push.shard_part import ShardPart


Data = bytes | memoryview

#: How often a stream is looked at within its idle timeout.
_LOOKS = 4
_RETRY_AFTER_S = 1.0


class UploadStream:
    """Serves one stream. It takes a message at a time, so gRPC's flow control bounds its memory.

    `deadline_s` is the time left to the call, or None; `who` is the caller.
    """

    def __init__(
        self,
        pushes: Pushes,
        requests: AsyncIterator[Message],
        deadline_s: float | None,
        who: str = "",
    ) -> None:
        self._pushes = pushes
        self._next = requests.__aiter__().__anext__
        self._deadline_s = deadline_s
        self._who = who
        self._push: Push | None = None
        self._writer = 0
        self._received = 0
        self._counted = 0
        #: Rises before and after every wait for a message: odd while the peer is waited for.
        self._ticks = 0
        self._watch: asyncio.TimerHandle | None = None

    async def run(self) -> pb.PushWeightsResponse:
        try:
            async with asyncio.timeout(None) as guard:
                self._watch_over(guard, -1, 0)
                commit = await self._open() or await self._pump()
            if isinstance(commit, pb.CommitPushRequest):
                commit = await self._commit(commit)
            elif commit is None:
                # What failed meanwhile is told here already, not at the commit only.
                check_open(self._opened().state)
            return self._response(commit)
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"no message arrived for {self._pushes.limits.stream_idle_timeout_s:g} s; open a "
                "new stream, resume from the offsets that GetPush returns, and send heartbeats "
                "while you prepare the next bytes",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        except WeightSyncError as error:
            if self._push is not None and error.reason in FATAL:
                self._push.lifecycle.fail(error)
                await self._push.lifecycle.closed()
            raise
        finally:
            try:
                await self._let_go()
            finally:
                self._end()

    async def _open(self) -> pb.CommitPushResponse | None:
        message = await self._receive()
        if message is None:
            raise refused("the stream holds no message; send begin or join first")
        if isinstance(message, ChunkView):
            raise refused("the first message of a stream must be begin or join")
        check_size(message, self._pushes.limits)
        if message.HasField("begin"):
            push = await self._pushes.open(message.begin, self._deadline_s, self._who)
            self._writer = message.begin.writer
        elif message.HasField("join"):
            push = self._pushes.find(message.join.push_id)
            self._writer = message.join.writer
            if push.state.committed is None:
                push.state.writers.check(self._writer)
                # After a restart of the server it goes on without another begin.
                push.state.writers.come(self._writer)
                await resume(push, self._deadline_s)
        else:
            raise refused("the first message of a stream must be begin or join")
        if push.state.committed is None:
            push.lifecycle.join()
        self._push = push
        return push.lifecycle.again() if push.state.committed is not None else None

    async def _receive(self) -> Message | None:
        self._ticks += 1
        try:
            return await self._next()
        except StopAsyncIteration:
            return None
        finally:
            self._ticks += 1

    async def _pump(self) -> pb.CommitPushRequest | None:
        """Move messages until the commit or the end. A shard never lies in this process's heap."""
        push = self._opened()
        state = push.state
        most = self._pushes.limits.max_chunk_bytes
        shard = -1
        chunk: ChunkView | pb.Chunk
        data: Data
        while True:
            # Bytes of the last message must not be kept while the next one is awaited.
            message = chunk = data = None  # type: ignore[assignment]
            message = await self._receive()
            if message is None:
                return None
            if isinstance(message, ChunkView):
                chunk = message
            elif message.HasField("chunk"):
                chunk = message.chunk
            elif message.HasField("commit"):
                return message.commit
            else:
                await self._other(push, message)
                continue
            if chunk.shard != shard:
                shard = -1
                part, segment = await self._claim(push, chunk.shard)
                view, size = part.window(segment.view), part.size
                shard = chunk.shard
            begin = chunk.offset
            data = chunk.data
            end = begin + len(data)
            if begin != part.received or end > size or len(data) > most or state.error:
                data = self._irregular(push, part, begin, data)
                begin, end = part.received, part.received + len(data)
            view[begin:end] = data
            part.received_to(end)
            self._received += end - begin
            failpoints.hit("receive.chunk")
            if end >= part.watermark:
                await push.pipeline.advance(part)
                self._count()
                if end == size:
                    shard = -1

    async def _claim(self, push: Push, shard: int) -> tuple[ShardPart, Segment]:
        check_open(push.state)
        part = push.slices.find(shard, self._writer, f"bytes of shard {shard}")
        part.own(self)
        push.pipeline.begin_receive()
        segment = await push.pipeline.ready(part.shard)
        return part, part.patch.segment if part.patch is not None else segment

    def _irregular(self, push: Push, part: ShardPart, begin: int, data: Data) -> Data:
        """Return the new bytes of a chunk that does not simply go on."""
        check_open(push.state)
        if len(data) > self._pushes.limits.max_chunk_bytes:
            raise refused(
                f"the chunk has {len(data)} bytes; send at most "
                f"{self._pushes.limits.max_chunk_bytes}"
            )
        shard = part.shard.index
        if begin > part.received:
            raise WeightSyncError(
                Reason.OFFSET_MISMATCH,
                f"a chunk of shard {shard} at byte {begin}, but {part.received} bytes are "
                "here; send on from there",
                metadata={"shard": str(shard), "received_bytes": str(part.received)},
            )
        if begin + len(data) > part.size:
            raise refused(
                f"bytes up to {begin + len(data)} of shard {shard}, whose layout declares "
                f"{part.size}"
            )
        return data[part.received - begin :]

    async def _other(self, push: Push, message: pb.PushWeightsRequest) -> None:
        check_open(push.state)
        check_size(message, self._pushes.limits)
        if message.HasField("layout"):
            await failpoints.reach("receive.layout")
            await push.layout.add(message.layout, self, self._writer)
        elif message.HasField("boxes"):
            await push.slices.add(message.boxes, self._writer, self)
        elif message.HasField("digests"):
            given = message.digests
            part = push.slices.find(given.shard, self._writer, "digests of a shard")
            push.pipeline.take_digests(part, given.first, given.digests)
        elif message.HasField("heartbeat"):
            # That it came is all there is to it.
            return
        elif message.WhichOneof("message") is None:
            raise refused("an empty message; set one of layout, chunk, digests or commit")
        else:
            raise refused("begin and join may only be the first message of a stream")

    async def _commit(self, request: pb.CommitPushRequest) -> pb.CommitPushResponse:
        push = self._opened()
        if request.push_id not in ("", push.state.id):
            raise refused("the commit names a different push than this stream serves")
        return await self._pushes.commit_push(push, request)

    def _opened(self) -> Push:
        if self._push is None:
            raise refused("the first message of a stream must be begin or join")
        return self._push

    def _response(self, commit: pb.CommitPushResponse | None) -> pb.PushWeightsResponse:
        push = self._opened()
        return pb.PushWeightsResponse(
            push_id=push.state.id,
            version=push.state.record.version,
            received_bytes=self._received,
            commit=commit,
        )

    def _count(self) -> None:
        self._pushes.meters.add_received(self._received - self._counted)
        self._counted = self._received

    async def _let_go(self) -> None:
        """Return when nobody writes for this stream any more."""

    def _watch_over(self, guard: asyncio.Timeout, ticks: int, silent: int) -> None:
        # Nothing per message but a counter: a timer that asks now and then whether it moved. While
        # the server makes the peer wait, the peer is not silent.
        loop = asyncio.get_running_loop()
        silent = silent + 1 if ticks == self._ticks and ticks % 2 else 0
        if silent == _LOOKS:
            guard.reschedule(loop.time())
            return
        pause = self._pushes.limits.stream_idle_timeout_s / _LOOKS
        self._watch = loop.call_later(pause, self._watch_over, guard, self._ticks, silent)

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._received != self._counted:
            self._count()
        if self._push is not None and self._push.state.committed is None:
            self._push.lifecycle.leave(self)
        if self._push is not None:
            self._push.slices.forget(self)
