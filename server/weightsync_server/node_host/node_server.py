"""The server of a node: joins the head, stages what that asks for, and joins again when it is gone.

The ranks of this node open segments here and are called by the engine's own executor; this process
never speaks to vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync import __version__
from weightsync.errors import Reason, WeightSyncError
from weightsync.node.v1 import node_pb2 as pb
from weightsync.node.v1 import node_pb2_grpc
from weightsync.shm.segment_socket import SegmentServer
from weightsync_server.node_host.page_relay import PageRelay
from weightsync_server.node_host.staged_copies import StagedCopies
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.ops.process_tuning import tune_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from weightsync_server.follow.grpc_origin import OriginAccess

__all__ = ["NodeOptions", "NodeServer"]

logger = logging.getLogger(__name__)

#: Seconds until it is tried again to join.
_AGAIN_S = 0.5
#: Seconds without a word to the head after which it is told that this node is alive.
_BEAT_S = 2.0


@dataclass(frozen=True)
class NodeOptions:
    """What a node's server needs to know.

    Attributes:
        head: How to reach the head.
        rank: Which node this is, from 1.
        segment_socket: Where the ranks of this node look for segments.
    """

    head: OriginAccess
    rank: int
    segment_socket: Path


class NodeServer:
    """Runs beside the ranks of one node. `start`, then `stop`.

    Args:
        options: See there.
    """

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Listen on the segment socket and begin to join the head, which need not be there yet.

        Raises:
            WeightSyncError: With the remedy.
        """
        async with contextlib.AsyncExitStack() as stack:
            tune_process()
            self._options.segment_socket.parent.mkdir(parents=True, exist_ok=True)
            segments = SegmentServer(self._options.segment_socket)
            stack.callback(segments.close)
            channel = self._options.head.channel()
            stack.push_async_callback(channel.close)
            stub = node_pb2_grpc.NodeServiceStub(channel)
            joining = asyncio.create_task(self._stay(segments, stub), name="node")
            stack.push_async_callback(_end, joining)
            self._stack = stack.pop_all()

    async def shut(self) -> str:
        """Wait for ever: what callers of this server there are, they come over files."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await ended

    async def stop(self, drain_s: float | None = None) -> None:
        """Leave the head; what ranks have mapped stays theirs."""
        del drain_s
        await self._stack.aclose()

    async def _stay(
        self, segments: SegmentServer, stub: node_pb2_grpc.NodeServiceAsyncStub
    ) -> None:
        said = ""
        while True:
            membership = _Membership(self._options, segments, stub)
            try:
                await membership.run()
            except Exception as error:
                refusal = to_refusal(error, f"serving a node of {self._options.head.url}")
                if refusal is not error:
                    logger.exception("not joined to %s", self._options.head.url)
                elif membership.heard or refusal.message != said:
                    # Once for each reason: a head may be away for hours.
                    logger.warning("not joined to %s: %s", self._options.head.url, refusal.message)
                said = refusal.message
            await asyncio.sleep(_AGAIN_S)


class _Membership:
    """One call of Join, and all that lies here because of it."""

    def __init__(
        self,
        options: NodeOptions,
        segments: SegmentServer,
        stub: node_pb2_grpc.NodeServiceAsyncStub,
    ) -> None:
        self._options = options
        self._stub = stub
        self._out: asyncio.Queue[pb.JoinRequest] = asyncio.Queue()
        self._copies = StagedCopies(segments, self._read)
        self._pages = PageRelay(segments, self._report)
        self._staging: dict[str, asyncio.Task[None]] = {}
        self.heard = False

    async def run(self) -> None:
        """Do what the head asks for until the call ends.

        Raises:
            WeightSyncError: Why it has ended.
        """
        relaying = asyncio.create_task(self._pages.run(), name="page relay")
        try:
            with self._options.head.refusing():
                call = self._stub.Join(self._says(), metadata=self._options.head.metadata())
                try:
                    async for request in call:
                        self.heard = True
                        self._do(request)
                finally:
                    call.cancel()
            raise WeightSyncError(Reason.SERVER_AWAY, "the head has ended the call")
        finally:
            for task in (relaying, *self._staging.values()):
                task.cancel()
            await asyncio.wait([relaying, *self._staging.values()])
            self._copies.close()
            self._pages.close()

    async def _says(self) -> AsyncIterator[pb.JoinRequest]:
        hello = pb.NodeHello(server_version=__version__, node_rank=self._options.rank)
        yield pb.JoinRequest(hello=hello)
        while True:
            try:
                async with asyncio.timeout(_BEAT_S):
                    message = await self._out.get()
            except TimeoutError:
                message = pb.JoinRequest()
            yield message

    def _do(self, request: pb.JoinResponse) -> None:
        if request.HasField("stage"):
            name = request.stage.name
            self._staging[name] = asyncio.create_task(self._stage(request.stage))
        elif request.HasField("forget"):
            staging = self._staging.pop(request.forget.name, None)
            if staging is not None:
                staging.cancel()
            self._copies.forget(request.forget.name)
        elif request.HasField("pages"):
            self._pages.publish(request.pages)
            self._ready(request.pages.name)

    async def _stage(self, request: pb.StageVersion) -> None:
        try:
            await self._copies.stage(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the head is told of it
            refusal = error if isinstance(error, WeightSyncError) else to_refusal(error, "staging")
            logger.warning("%s is not staged: %s", request.name, refusal.message)
            self._ready(request.name, refusal)
        else:
            self._ready(request.name)

    def _ready(self, name: str, refusal: WeightSyncError | None = None) -> None:
        ready = pb.NodeReady(name=name)
        if refusal is not None:
            ready.error, ready.reason = refusal.message, refusal.reason
        self._out.put_nowait(pb.JoinRequest(ready=ready))

    def _report(self, report: pb.RankReport) -> None:
        self._out.put_nowait(pb.JoinRequest(report=report))

    async def _read(self, request: pb.ReadStagedRequest) -> AsyncIterator[pb.ReadStagedResponse]:
        with self._options.head.refusing():
            call = self._stub.ReadStaged(request, metadata=self._options.head.metadata())
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
