"""The servers of other nodes that have joined this one, what they are given, and what is there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from weightsync import __version__, clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.node.v1 import node_pb2 as pb
from weightsync.shm.segment_socket import SegmentServer
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion
from weightsync.shm.status_page import PageWriter
from weightsync_server.auth.caller import Caller, UseCase
from weightsync_server.ops.tasks import retrieve


class NodeGroup:
    """At most one server for each node of this server's engine."""

    def __init__(self, segments: SegmentServer) -> None:
        self._segments = segments
        self._joined: dict[int, JoinedNode] = {}
        self._pages: dict[str, PageWriter] = {}
        self._engine: object = None
        self._count = 0
        self._changes: Counter[int] = Counter()

    def changes(self, ranks: Iterable[int]) -> int:
        """Return what rises whenever the server of one of these nodes joins or leaves."""
        return sum(self._changes[rank] for rank in ranks)

    def claim(self, engine: object, count: int) -> None:
        """Give the nodes to an engine, however often it connects, unless another has them.

        `count` is how many nodes the engine has, this one included.
        """
        if self._engine not in (None, engine):
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                "this server has an engine of several nodes already; start a weightsync-server for "
                "each of them",
            )
        self._engine, self._count = engine, count

    def release(self, engine: object) -> None:
        if self._engine is engine:
            self._engine, self._count = None, 0

    def find(self, rank: int) -> JoinedNode | None:
        return self._joined.get(rank)

    def join(self, node: JoinedNode) -> None:
        """Make it the server of its node, in place of one that joined before."""
        if self._count and node.rank >= self._count:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"the engine of this server has {self._count} nodes and no node {node.rank}; set "
                "--node-rank as vLLM has it there",
            )
        before = self._joined.pop(node.rank, None)
        if before is not None:
            before.leave("was replaced by another server")
        self._joined[node.rank] = node
        self._changes[node.rank] += 1

    def part(self, node: JoinedNode, why: str) -> None:
        node.leave(why)
        if self._joined.get(node.rank) is node:
            del self._joined[node.rank]
            self._changes[node.rank] += 1

    def close(self) -> None:
        """End every call of a node, which would not end by itself."""
        for node in list(self._joined.values()):
            self.part(node, "was disconnected: the server is stopping")
        for page in self._pages.values():
            page.close()
        self._pages.clear()

    def forget_withdrawn(self) -> None:
        """Let every node give back the versions that are in no slot here any more."""
        for node in self._joined.values():
            for name in node.versions:
                if not self._segments.has(name):
                    node.forget(name)
        for page in [name for name in self._pages if not self._segments.has(name)]:
            self._pages.pop(page).close()

    def read(self, name: str, shard: int | None) -> MappedSegment:
        """Return the bytes of a staged version's document, or of one of its shards."""
        document = self._mapped(name)
        if shard is None:
            return document
        segments = StagedVersion.segments_in(document.view)
        document.close()
        if shard >= len(segments):
            raise _unknown(f"{name} has no shard {shard}")
        return self._mapped(segments[shard])

    def report(self, node: JoinedNode, report: pb.RankReport) -> None:
        """Write what a rank of a node reports where this server reads it.

        Reports on other ranks, or of a session that is over, are dropped.
        """
        if not node.reports_on(report.page):
            return
        page = self._pages.get(report.page)
        if page is None:
            found = self._segments.open(report.page)
            if found is None:
                # Of a session that is over.
                return
            page = self._pages[report.page] = PageWriter(found[0])
        page.write(json.loads(report.report_json))

    def _mapped(self, name: str) -> MappedSegment:
        found = self._segments.open(name)
        if found is None:
            raise _unknown(f"{name} is no longer staged")
        return MappedSegment(*found)


def _unknown(what: str) -> WeightSyncError:
    return WeightSyncError(Reason.VERSION_UNKNOWN, f"{what}; the head asks for it again")


class JoinedNode:
    """Asks one node's server for things by name, each once, and knows which are there.

    `rank` says which node it is, from 1; `left` why it has left, or empty.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.left = ""
        self._requests: asyncio.Queue[pb.JoinResponse | None] = asyncio.Queue()
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._versions: set[str] = set()
        self._page = ""
        self._reporting: frozenset[str] = frozenset()

    @property
    def versions(self) -> frozenset[str]:
        """Names of the staged versions that it was asked for and did not give back."""
        return frozenset(self._versions)

    async def requests(self) -> AsyncIterator[pb.JoinResponse]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def have(self, name: str, request: pb.JoinResponse) -> None:
        """Return when the node has what is asked for; asks once, and again after an error."""
        if self.left:
            raise self.away()
        answer = self._asked.get(name)
        if answer is None:
            answer = self._asked[name] = asyncio.get_running_loop().create_future()
            # Whoever waited may be gone.
            answer.add_done_callback(retrieve)
            self._note(name, request)
            self._requests.put_nowait(request)
        await asyncio.shield(answer)

    def _note(self, name: str, request: pb.JoinResponse) -> None:
        if request.HasField("stage"):
            self._versions.add(name)
        elif request.HasField("pages"):
            # Those before were of a session that is over.
            if self._page != name:
                self._asked.pop(self._page, None)
            self._page = name
            self._reporting = frozenset(f"{name}/{rank}" for rank in request.pages.ranks)

    def has(self, name: str) -> bool:
        answer = self._asked.get(name)
        return answer is not None and answer.done() and not self.left

    def reports_on(self, page: str) -> bool:
        return page in self._reporting

    def take(self, ready: pb.NodeReady) -> None:
        answer = self._asked.get(ready.name)
        if answer is None or answer.done():
            return
        if not ready.error:
            answer.set_result(None)
            return
        del self._asked[ready.name]
        reason = Reason(ready.reason) if ready.reason in Reason.__members__ else Reason.FAULT
        answer.set_exception(WeightSyncError(reason, f"node {self.rank}: {ready.error}"))

    def forget(self, name: str) -> None:
        self._versions.discard(name)
        if self._asked.pop(name, None) is not None:
            self._requests.put_nowait(pb.JoinResponse(forget=pb.ForgetVersion(name=name)))

    def leave(self, why: str) -> None:
        """Be no node any more: whoever waits for it is told why."""
        if self.left:
            return
        self.left = why
        self._requests.put_nowait(None)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self.away())

    def away(self) -> WeightSyncError:
        return WeightSyncError(
            Reason.SERVER_AWAY,
            f"the weightsync-server of node {self.rank} {self.left}; check its log, and apply "
            "again when it is back",
            retry_after_s=1.0,
        )


logger = logging.getLogger(__name__)

_SERVICE = pb.DESCRIPTOR.services_by_name["NodeService"].full_name
_CHUNK = 1 << 20
#: A node that is frozen, or cut off, counts as gone after this time, seconds: gRPC's own pings wait
#: behind what it does not read.
_SILENCE_S = 10.0
#: Highest rank that a node may say it is, so that strays are bounded.
_MAX_RANK = 65_535


class NodeServicer:
    def __init__(self, group: NodeGroup) -> None:
        self._group = group

    def use_cases(self) -> Mapping[str, UseCase]:
        return {f"/{_SERVICE}/Join": self.join, f"/{_SERVICE}/ReadStaged": self.read_staged}

    async def join(
        self, caller: Caller, requests: AsyncIterator[pb.JoinRequest]
    ) -> AsyncIterator[pb.JoinResponse]:
        messages = aiter(requests)
        node = JoinedNode(await _hello(messages))
        self._group.join(node)
        logger.info("the weightsync-server of node %d has joined from %s", node.rank, caller.peer)
        listening = asyncio.create_task(self._listen(messages, node))
        try:
            async for request in node.requests():
                yield request
            raise WeightSyncError(Reason.SHUTTING_DOWN, f"node {node.rank} {node.left}")
        finally:
            listening.cancel()
            self._group.part(node, "has exited")
            logger.warning("the weightsync-server of node %d %s", node.rank, node.left)

    async def read_staged(
        self, _: Caller, request: pb.ReadStagedRequest
    ) -> AsyncIterator[pb.ReadStagedResponse]:
        shard = request.shard if request.HasField("shard") else None
        found = self._group.read(request.name, shard)
        try:
            for start in range(0, len(found.view), _CHUNK):
                yield pb.ReadStagedResponse(data=bytes(found.view[start : start + _CHUNK]))
        finally:
            found.close()

    async def _listen(self, requests: AsyncIterator[pb.JoinRequest], node: JoinedNode) -> None:
        # However the stream ends, the node has gone; why is for the call itself to say.
        with contextlib.suppress(Exception):
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    request = await anext(requests)
                if request.HasField("report"):
                    self._group.report(node, request.report)
                elif request.HasField("ready"):
                    node.take(request.ready)
        self._group.part(node, "has exited")


async def _hello(requests: AsyncIterator[pb.JoinRequest]) -> int:
    first = await anext(requests, None)
    if first is None or not first.hello.node_rank:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "set --node-rank: the first message of a node gives its rank, from 1",
        )
    if first.hello.node_rank > _MAX_RANK:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"node_rank is over {_MAX_RANK}; set --node-rank as vLLM has it there",
        )
    if first.hello.server_version != __version__:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"node {first.hello.node_rank} has weightsync {first.hello.server_version}, but the "
            f"head has {__version__}; install the same release on both",
        )
    return int(first.hello.node_rank)


class EngineNodes:
    """The other nodes of one engine; one that is all on this host needs nothing of anybody.

    `count` includes this node. `ranks` has all ranks as dp/pp/tp, in order: as many on each node,
    this node's first.
    """

    def __init__(self, group: NodeGroup, engine: object, count: int, ranks: Sequence[str]) -> None:
        if count > 1:
            group.claim(engine, count)
        self._group = group
        self._count = count
        self._ranks = tuple(ranks)

    @property
    def changes(self) -> int:
        """Rises whenever what a node had may be there no more."""
        return self._group.changes(range(1, self._count))

    async def have(self, args: Mapping[str, Any], timeout_s: float) -> float:
        """Return when every node has staged the version, and the pages, of a worker call.

        Returns how long that took, in seconds, or 0 if there was nothing to wait for. When this
        raises, the ranks were asked for nothing.
        """
        # What is prepared lies in memory that the ranks have mapped: a commit needs no server.
        if self._count == 1 or not (args.get("document") or args.get("page")):
            return 0.0
        begun = clock.monotonic()
        nodes = list(self._nodes())
        self._group.forget_withdrawn()
        asked = [
            node.have(name, request)
            for node in nodes
            for name, request in self._requests(args, node.rank)
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*asked)
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"the other nodes of this engine did not stage a version within {timeout_s:g} s; "
                "check the logs of their weightsync-servers, or raise prepare_timeout",
            ) from None
        return clock.monotonic() - begun

    def check_staged(self, document: str) -> None:
        """Refuse a call in a pause that would wait until a node has staged a version."""
        for node in self._nodes():
            if not node.has(document):
                raise WeightSyncError(
                    Reason.SERVER_AWAY,
                    f"the weightsync-server of node {node.rank} lost what it had staged; apply "
                    "again",
                    retry_after_s=1.0,
                )

    def check(self, changes: int) -> None:
        """Refuse to wait for reports if a node has left since `changes` had this value."""
        if self.changes == changes:
            return
        for _ in self._nodes():
            pass
        raise WeightSyncError(
            Reason.SERVER_AWAY,
            "the weightsync-server of another node of this engine restarted during the apply; "
            "apply again",
            retry_after_s=1.0,
        )

    def _requests(
        self, args: Mapping[str, Any], node: int
    ) -> Iterator[tuple[str, pb.JoinResponse]]:
        document, page = args.get("document"), args.get("page")
        if document:
            digest = str(args.get("content_digest", ""))
            stage = pb.StageVersion(name=document, content_digest=digest)
            yield document, pb.JoinResponse(stage=stage)
        if page:
            each = len(self._ranks) // self._count
            ranks = self._ranks[node * each : (node + 1) * each]
            pages = pb.PublishPages(name=page, ranks=ranks)
            yield page, pb.JoinResponse(pages=pages)

    def _nodes(self) -> Iterator[JoinedNode]:
        """Yield the server of every other node; SERVER_AWAY: one has none."""
        for rank in range(1, self._count):
            node = self._group.find(rank)
            if node is None:
                raise WeightSyncError(
                    Reason.SERVER_AWAY,
                    f"node {rank} of this engine has no weightsync-server, so its ranks get no "
                    f"weights; start weightsync-server --node-of HEAD --node-rank {rank} there",
                    retry_after_s=1.0,
                )
            yield node
