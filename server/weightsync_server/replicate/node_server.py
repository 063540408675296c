"""The server of a node: joins the head, stages what that asks for, and joins again when it is gone.

The ranks of this node open segments here and are called by the engine's own executor; this process
never speaks to vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync import __version__, clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.host_dirs import make_dir
from weightsync.model.digest import tensor_digest
from weightsync.model.manifest import Manifest
from weightsync.node.v1 import node_pb2 as pb
from weightsync.node.v1 import node_pb2_grpc
from weightsync.process_limits import available_bytes
from weightsync.shm.segment_socket import SegmentServer
from weightsync.shm.segments import Segment
from weightsync.shm.staged_version import StagedVersion, shard_copy
from weightsync.shm.status_page import PAGE_BYTES, PageReader
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.ops.process_tuning import tune_process
from weightsync_server.ops.tasks import all_done, cancel_tasks, in_thread

if TYPE_CHECKING:
    from weightsync_server.replicate.grpc_source import OriginAccess

    #: Streams what ReadStaged answers.
    Read = Callable[[pb.ReadStagedRequest], AsyncGenerator[pb.ReadStagedResponse, None]]

#: Shards under way at once.
_AT_ONCE = 4
#: Most that a document may have, bytes.
_MAX_DOCUMENT = 1 << 30


class StagedCopies:
    """Makes copies and publishes them on this node's segment socket; `read` asks the head.

    Each is proved before it is handed out, and written once: memory that a rank may map is never
    given another content.
    """

    def __init__(self, server: SegmentServer, read: Read) -> None:
        self._server = server
        self._read = read
        self._owned: dict[str, list[tuple[str, Segment]]] = {}
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def stage(self, request: pb.StageVersion) -> None:
        """Return when a version lies here, proved, and ranks find it under its name.

        After an error nothing of it lies here.
        """
        await failpoints.reach("node.stage")
        name = request.name
        staged = await self._document(name)
        manifest = staged.manifest
        # What a layout is checked by has names and no bytes.
        shards = range(len(manifest.layout.shards)) if any(staged.segments) else range(0)
        if shards:
            _check_content(name, manifest, request.content_digest)
            _check_room(manifest)
        segments: dict[int, Segment] = {}
        copies = tuple(shard_copy(name, at) for at in shards) or staged.segments
        try:
            await all_done([self._shard(name, manifest, at, segments) for at in shards])
            document = await in_thread(StagedVersion(manifest, copies).to_segment)
        except BaseException:
            for segment in segments.values():
                segment.close()
            raise
        await failpoints.reach("node.staged")
        self._publish(name, [*((copies[at], segments[at]) for at in shards), (name, document)])

    def forget(self, name: str) -> None:
        """Hand a version out no more; its memory is free when no rank maps it."""
        for published, segment in self._owned.pop(name, ()):
            self._server.withdraw(published)
            segment.close()

    def close(self) -> None:
        for name in list(self._owned):
            self.forget(name)

    def _publish(self, name: str, segments: list[tuple[str, Segment]]) -> None:
        self.forget(name)
        self._owned[name] = segments
        # The document last: whoever reads it finds the rest.
        for published, segment in segments:
            self._server.publish(published, segment.read_only_fd(), segment.capacity)

    async def _document(self, name: str) -> StagedVersion:
        data = bytearray()
        async for message in self._read(pb.ReadStagedRequest(name=name)):
            data += message.data
            if len(data) > _MAX_DOCUMENT:
                raise _corrupt(f"the document of {name} has over {_MAX_DOCUMENT} bytes")
        try:
            return await in_thread(StagedVersion.from_view, memoryview(bytes(data)))
        except ValueError as error:
            raise _corrupt(f"the document of {name} cannot be read ({error})") from error

    async def _shard(
        self, name: str, manifest: Manifest, index: int, segments: dict[int, Segment]
    ) -> None:
        size = manifest.layout.shards[index].size
        async with self._gate:
            segment = segments[index] = await in_thread(Segment.create, size)
            at = 0
            request = pb.ReadStagedRequest(name=name, shard=index)
            async with contextlib.aclosing(self._read(request)) as messages:
                async for message in messages:
                    await failpoints.reach("node.chunk")
                    piece = message.data[: size - at]
                    segment.fill(at, piece)
                    at += len(piece)
                    if at == size:
                        break
            if at < size:
                raise _corrupt(f"shard {index} of {name} has {at} bytes, not {size}")
            if wrong := await in_thread(_wrong_tensor, manifest, index, segment):
                raise _corrupt(f"tensor {wrong} of {name} does not have the digest in its manifest")


def _wrong_tensor(manifest: Manifest, index: int, segment: Segment) -> str:
    """Return the name of a tensor whose bytes are not what the manifest tells; "": all are."""
    start = manifest.layout.shards[index].data_start
    tensors, digests = manifest.layout.by_shard[index], manifest.digests_by_shard[index]
    for tensor, digest in zip(tensors, digests, strict=True):
        if tensor_digest(segment.view[start + tensor.begin : start + tensor.end]) != digest:
            return tensor.name
    return ""


def _check_content(name: str, manifest: Manifest, expected: str) -> None:
    if expected and manifest.content_digest != expected:
        raise _corrupt(f"the document of {name} is of content {manifest.content_digest}")


def _check_room(manifest: Manifest) -> None:
    size, free = manifest.layout.size, available_bytes()
    if size > free:
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"free memory on this node: the version takes {size} bytes, and {free} are left",
        )


def _corrupt(what: str) -> WeightSyncError:
    return WeightSyncError(Reason.DATA_CORRUPT, f"{what}; it is asked for again at the next apply")


logger = logging.getLogger(__name__)


#: How often pages are looked at while ranks are at work, and otherwise; seconds.
_POLL_S, _IDLE_S = 0.002, 0.05
#: From the last change on for so long ranks count as at work, seconds.
_AT_WORK_S = 5.0


class PageRelay:
    """Publishes pages and passes on what is written there; `send` takes a report for the head."""

    def __init__(self, server: SegmentServer, send: Callable[[pb.RankReport], None]) -> None:
        self._server = server
        self._send = send
        self._pages: dict[str, PageReader] = {}
        self._reports: dict[str, dict[str, Any]] = {}

    def publish(self, request: pb.PublishPages) -> None:
        """Let ranks find their pages; those before are withdrawn."""
        self.close()
        for rank in request.ranks:
            page = self._pages[f"{request.name}/{rank}"] = PageReader()
            self._server.publish(f"{request.name}/{rank}", os.dup(page.segment.fd), PAGE_BYTES)

    async def run(self) -> None:
        """Pass on what ranks write, for ever."""
        changed = 0.0
        while True:
            for name, page in list(self._pages.items()):
                if self._pages.get(name) is not page:
                    continue
                report = page.read()
                if report is not None and report != self._reports.get(name):
                    await failpoints.reach("node.report")
                    self._reports[name] = report
                    self._send(pb.RankReport(page=name, report_json=json.dumps(report).encode()))
                    changed = clock.monotonic()
            at_work = clock.monotonic() - changed < _AT_WORK_S
            await asyncio.sleep(_POLL_S if at_work else _IDLE_S)

    def close(self) -> None:
        """Withdraw the pages; what a rank still writes there is read by nobody."""
        for name, page in self._pages.items():
            self._server.withdraw(name)
            page.close()
        self._pages, self._reports = {}, {}


#: Seconds until it is tried again to join.
_AGAIN_S = 0.5
#: Seconds without a word to the head after which it is told that this node is alive.
_BEAT_S = 2.0


class NodeServer:
    """Serves the node with number `rank`, from 1, of the engine beside the server `head`."""

    def __init__(self, head: OriginAccess, rank: int, segment_socket: Path) -> None:
        self._head, self._rank = head, rank
        self._segment_socket = segment_socket
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Listen on the segment socket and begin to join the head, which need not be there yet."""
        async with contextlib.AsyncExitStack() as stack:
            tune_process()
            make_dir(self._segment_socket.parent)
            segments = SegmentServer(self._segment_socket)
            stack.callback(segments.close)
            channel = self._head.channel()
            stack.push_async_callback(channel.close)
            stub = node_pb2_grpc.NodeServiceStub(channel)
            joining = asyncio.create_task(self._stay(segments, stub), name="node")
            stack.push_async_callback(cancel_tasks, joining)
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
            membership = _Membership(self._head, self._rank, segments, stub)
            try:
                await membership.run()
            except Exception as error:
                refusal = to_refusal(error, f"serving a node of {self._head.url}")
                if refusal is not error:
                    logger.exception(
                        "a fault of this node while it was joined to the head %s; it joins again",
                        self._head.url,
                    )
                elif membership.heard or refusal.message != said:
                    # Once for each reason: a head may be away for hours.
                    logger.warning(
                        "this node is not joined to the head %s, and tries again: %s",
                        self._head.url,
                        refusal.message,
                    )
                said = refusal.message
            await asyncio.sleep(_AGAIN_S)


class _Membership:
    """One call of Join, and all that lies here because of it."""

    def __init__(
        self,
        head: OriginAccess,
        rank: int,
        segments: SegmentServer,
        stub: node_pb2_grpc.NodeServiceAsyncStub,
    ) -> None:
        self._head, self._rank = head, rank
        self._stub = stub
        self._out: asyncio.Queue[pb.JoinRequest] = asyncio.Queue()
        self._copies = StagedCopies(segments, partial(head.stream, stub.ReadStaged))
        self._pages = PageRelay(segments, self._report)
        self._staging: dict[str, asyncio.Task[None]] = {}
        self.heard = False

    async def run(self) -> None:
        """Do what the head asks for until the call ends; raises why it has ended."""
        relaying = asyncio.create_task(self._pages.run(), name="page relay")
        try:
            joined = self._head.stream(self._stub.Join, self._says())
            async with contextlib.aclosing(joined) as requests:
                async for request in requests:
                    self.heard = True
                    self._do(request)
            raise WeightSyncError(Reason.SERVER_AWAY, "the head ended the connection")
        finally:
            await cancel_tasks(relaying, *self._staging.values())
            self._copies.close()
            self._pages.close()

    async def _says(self) -> AsyncIterator[pb.JoinRequest]:
        hello = pb.NodeHello(server_version=__version__, node_rank=self._rank)
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
            logger.warning("this node did not stage %s: %s", request.name, refusal.message)
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
