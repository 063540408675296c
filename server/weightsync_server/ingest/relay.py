"""One PushWeights stream in an ingest process: chunks into segments, all else to the server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.tensor_slices import SliceSpan
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire import child_channel
from weightsync.wire.child_channel import read_note
from weightsync.wire.documents import refusal
from weightsync_server.ops.os_errors import system_fault
from weightsync_server.push import ChunkView, SliceWindow, plain_chunk
from weightsync_server.workers.runtime.mappings import Maps

_RECEIVE_BYTES = 64 << 10
#: Seconds after which the server is told of chunks, so that it is not for each of them. When the
#: stream is cut it is told before that; what a process does not come to tell is sent again.
_TELL_S = 0.02
#: Seconds until the server must have heard of a stream; else the caller is sent to it itself.
_HEARD_S = 10.0
#: Only a grant brings a descriptor.
_MAX_FDS = 4


class RawMessage:
    """A message that is no plain chunk, serialised as it came; the server's process reads it."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @property
    def begin(self) -> pb.BeginPushRequest:
        """What it begins, for those who ask for authority; nothing where it cannot be read."""
        try:
            return pb.PushWeightsRequest.FromString(self.data).begin
        except DecodeError:
            return pb.BeginPushRequest()


def take(message: bytes) -> ChunkView | RawMessage:
    return plain_chunk(message) or RawMessage(message)


class Done(NamedTuple):
    status: dict[str, Any]
    response: bytes


class _Claim:
    """A shard that may be written from `position` on, and must be told of at the mark."""

    def __init__(self, shard: int, grant: dict[str, Any], view: memoryview | SliceWindow) -> None:
        self.shard = shard
        self.view = view
        self.position: int = grant["received"]
        self.reported = self.position
        self.size: int = grant["size"]
        self.mark: int = grant["mark"]
        self.most: int = grant["most"]


class Relay:
    """Serves one stream; nothing is written after `run` has returned or raised."""

    def __init__(self, sock: socket.socket, maps: Maps) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._maps = maps
        self._claim: _Claim | None = None
        self._used = contextlib.ExitStack()
        self._inbox = bytearray()
        self._fds: list[int] = []
        self._let_go = self._sending = False
        self._timer: asyncio.TimerHandle | None = None
        self._unheard = self._loop.call_later(_HEARD_S, self._lose)
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._done: asyncio.Future[Done] = self._loop.create_future()

    @classmethod
    async def connect(cls, path: str, maps: Maps) -> Relay:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, path)
        except OSError as error:
            sock.close()
            raise _away() from error
        return cls(sock, maps)

    async def run(
        self, call: dict[str, Any], requests: AsyncIterator[ChunkView | RawMessage]
    ) -> Done:
        """Move messages until the server tells how the call ended; `call` says who calls.

        Raises SERVER_AWAY when the server has ended the connection, or has not heard of the stream
        in time.
        """
        self._loop.add_reader(self._sock, self._readable)
        pump = asyncio.create_task(self._pump(call, requests))
        try:
            await asyncio.wait((pump, self._done), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                await self._report(pump)
            return await self._done
        finally:
            self._stop()
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            self._close()

    async def _report(self, pump: asyncio.Task[None]) -> None:
        """Let the server decide about a refusal or a system fault; raise any other error."""
        # When the connection takes no more, the server tells why, or is gone.
        with contextlib.suppress(ConnectionError):
            try:
                pump.result()
            except WeightSyncError as refusal:
                await self._fail(refusal)
            except (OSError, MemoryError) as error:
                fault = system_fault(error, "receiving a shard")
                if fault is None or isinstance(error, ConnectionError):
                    raise
                await self._fail(fault)

    async def _fail(self, error: WeightSyncError) -> None:
        await self._tell({"op": "failed", **refusal(error)})

    async def _pump(
        self, call: dict[str, Any], requests: AsyncIterator[ChunkView | RawMessage]
    ) -> None:
        await self._tell(call)
        async for message in requests:
            if isinstance(message, RawMessage):
                await self._whole(message.data)
            else:
                await self._chunk(message)
            # Bytes of the last message must not be kept while the next one is awaited.
            del message
        await self._tell({"op": "end"})
        self._stop()

    async def _whole(self, message: bytes) -> None:
        """Let the server judge a message. It may write bytes itself: no claim is good after it."""
        await self._tell({"op": "message"}, message)
        self._release()

    async def _chunk(self, chunk: ChunkView) -> None:
        claim = self._claim
        if claim is None or claim.shard != chunk.shard:
            claim = await self._claimed(chunk.shard)
        begin, end = chunk.offset, chunk.offset + len(chunk.data)
        full = begin == claim.size
        if begin != claim.position or full or end > claim.size or len(chunk.data) > claim.most:
            # What does not simply go on.
            await self._whole(bytes(chunk.data.obj))
            return
        if self._let_go:
            return
        failpoints.hit("ingest.chunk")
        claim.view[begin:end] = chunk.data
        failpoints.hit("ingest.copied")
        claim.position = end
        if end < claim.mark:
            self._timer = self._timer or self._loop.call_later(_TELL_S, self._tell_now)
            return
        claim.reported = end
        wrote = {"op": "wrote", "shard": claim.shard, "end": end, "due": True}
        claim.mark = (await self._ask(wrote))["mark"]
        if end == claim.size:
            self._release()

    async def _claimed(self, shard: int) -> _Claim:
        grant = await self._ask({"op": "claim", "shard": shard})
        self._release()
        name, capacity = grant["segment"]
        boxes: bool = grant.get("boxes", False)
        if len(self._fds) < 1 + boxes:
            # The kernel drops descriptors over the limit, and says so to nobody.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        fd = self._fds.pop(0)
        view = self._used.enter_context(self._maps.use(name, fd, capacity, writable=True))
        window = SliceWindow(view, self._spans()) if boxes else view
        self._claim = _Claim(shard, grant, window)
        return self._claim

    def _spans(self) -> list[SliceSpan]:
        fd = self._fds.pop(0)
        try:
            spans = read_note(fd)["spans"]
        finally:
            os.close(fd)
        return [
            SliceSpan(begin, run, tuple(counts), tuple(strides))
            for begin, run, counts, strides in spans
        ]

    def _release(self) -> None:
        self._claim = None
        self._used.close()

    async def _tell(self, document: dict[str, Any], blob: bytes = b"") -> None:
        # In order: what was written before goes before.
        claim, data = self._claim, self._untold() + child_channel.encode(document, blob)
        self._sending = True
        try:
            await self._loop.sock_sendall(self._sock, data)
        finally:
            self._sending = False
        if claim is not None:
            # Nothing is written while something is being told.
            claim.reported = claim.position

    async def _ask(self, document: dict[str, Any]) -> dict[str, Any]:
        self._answer = self._loop.create_future()
        await self._tell(document)
        return await self._answer

    def _untold(self) -> bytes:
        claim = self._claim
        if claim is None or claim.reported == claim.position:
            return b""
        return child_channel.encode(
            {"op": "wrote", "shard": claim.shard, "end": claim.position, "due": False}
        )

    def _tell_now(self) -> None:
        """Tell what was written, unless more is about to be told; once more if there is no room."""
        self._timer = None
        claim = self._claim
        if self._sending or claim is None:
            return
        try:
            # A message as small as this is taken whole or not at all.
            self._sock.send(self._untold())
            claim.reported = claim.position
        except BlockingIOError:
            self._timer = self._loop.call_later(_TELL_S, self._tell_now)
        except OSError:
            # The server is gone: `_readable` learns it as well.
            return

    def _stop(self) -> None:
        if not self._let_go:
            self._let_go = True
            self._tell_now()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, _MAX_FDS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self._fds += fds
        self._inbox += data
        while (frame := child_channel.split(self._inbox)) is not None:
            self._hear(*frame)
        if not data:
            self._loop.remove_reader(self._sock)
            self._stop()
            self._lose()

    def _lose(self) -> None:
        if not self._done.done():
            self._done.set_exception(_away())

    def _hear(self, document: dict[str, Any], blob: bytes) -> None:
        op = document["op"]
        self._unheard.cancel()
        if op == "heard":
            return
        if op == "stop":
            self._stop()
        elif op == "done":
            self._stop()
            self._done.set_result(Done(document, blob))
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(document)

    def _close(self) -> None:
        self._unheard.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._release()
        for fd in self._fds:
            os.close(fd)
        self._sock.close()
        if self._done.done() and not self._done.cancelled():
            # Retrieved: whoever waited may have been cancelled.
            self._done.exception()


def _away() -> WeightSyncError:
    return WeightSyncError(
        Reason.SERVER_AWAY,
        "resume on a new stream to the server's address: the server's main process did not "
        "accept this one",
        retry_after_s=0.2,
    )
