"""What an engine of several nodes needs on each before its ranks are asked for anything."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.node.v1 import node_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weightsync_server.nodes.joined_node import JoinedNode
    from weightsync_server.nodes.node_group import NodeGroup

__all__ = ["EngineNodes"]


class EngineNodes:
    """The other nodes of one engine. One that is all on this host needs nothing of anybody.

    Args:
        group: The servers that have joined.
        engine: Whose nodes they are.
        count: On how many nodes the engine's ranks are.
        ranks: All of them as dp/pp/tp, in order: as many on each node, the first here.

    Raises:
        WeightSyncError: ENGINE_UNSUPPORTED: they are another engine's already.
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

        Returns how long that took, in seconds; 0: there was nothing to wait for.

        Args:
            args: Of the call; those named `document` and `page` count.
            timeout_s: Longest wait, seconds.

        Raises:
            WeightSyncError: SERVER_AWAY: a node has no server; or why one cannot;
                DEADLINE_EXCEEDED. The ranks were asked for nothing.
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
                "look at the logs of their weightsync-servers, or raise prepare_timeout",
            ) from None
        return clock.monotonic() - begun

    def check_staged(self, document: str) -> None:
        """Refuse a call in a pause that would wait until a node has staged a version.

        Args:
            document: Of the version, which `have` was to bring there.

        Raises:
            WeightSyncError: SERVER_AWAY: a node has none, or is back without it.
        """
        for node in self._nodes():
            if not node.has(document):
                raise WeightSyncError(
                    Reason.SERVER_AWAY,
                    f"the weightsync-server of node {node.rank} lost what it had staged; apply "
                    "again",
                    retry_after_s=1.0,
                )

    def check(self, changes: int) -> None:
        """Refuse to wait for reports that a node's server was to pass on and will not.

        Args:
            changes: What `changes` was when they were asked for.

        Raises:
            WeightSyncError: SERVER_AWAY.
        """
        if self.changes == changes:
            return
        for _ in self._nodes():
            pass
        raise WeightSyncError(
            Reason.SERVER_AWAY,
            "the weightsync-server of another node of this engine left in the middle of it and is "
            "back; apply again",
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
        """Yield the server of every other node.

        Raises:
            WeightSyncError: SERVER_AWAY: one has none.
        """
        for rank in range(1, self._count):
            node = self._group.find(rank)
            if node is None:
                raise WeightSyncError(
                    Reason.SERVER_AWAY,
                    f"node {rank} of this engine has no weightsync-server, so that its ranks get "
                    f"no weights; start weightsync-server --node-of HEAD --node-rank {rank} there",
                    retry_after_s=1.0,
                )
            yield node
