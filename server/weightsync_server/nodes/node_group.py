"""The servers of other nodes that have joined this one, and what they are given."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion
from weightsync.shm.status_page import PageWriter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.node.v1 import node_pb2 as pb
    from weightsync.shm.segment_socket import SegmentServer
    from weightsync_server.nodes.joined_node import JoinedNode

__all__ = ["NodeGroup"]


class NodeGroup:
    """At most one server for each node of this server's engine.

    Args:
        segments: Has what they may read, and the pages that their ranks report on.
    """

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
        """Make them the nodes of an engine, however often it connects.

        Args:
            engine: Whose they are.
            count: How many nodes it has, the first one here.

        Raises:
            WeightSyncError: ENGINE_UNSUPPORTED: they are another engine's.
        """
        if self._engine not in (None, engine):
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                "this server has an engine of several nodes already; start a weightsync-server for "
                "each of them",
            )
        self._engine, self._count = engine, count

    def release(self, engine: object) -> None:
        """Take note that an engine is gone for good; another one may have them."""
        if self._engine is engine:
            self._engine, self._count = None, 0

    def find(self, rank: int) -> JoinedNode | None:
        """Return the server of a node; None: there is none."""
        return self._joined.get(rank)

    def join(self, node: JoinedNode) -> None:
        """Make it the server of its node, in place of one that joined before.

        Raises:
            WeightSyncError: REQUEST_INVALID: the engine has no such node.
        """
        if self._count and node.rank >= self._count:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"the engine of this server has {self._count} nodes and no node {node.rank}; set "
                "--node-rank as vLLM has it there",
            )
        before = self._joined.pop(node.rank, None)
        if before is not None:
            before.leave("was replaced by another one")
        self._joined[node.rank] = node
        self._changes[node.rank] += 1

    def part(self, node: JoinedNode, why: str) -> None:
        """Let it be the server of its node no more."""
        node.leave(why)
        if self._joined.get(node.rank) is node:
            del self._joined[node.rank]
            self._changes[node.rank] += 1

    def close(self) -> None:
        """End every call of a node, which would not end by itself."""
        for node in list(self._joined.values()):
            self.part(node, "was sent away: the server stops")
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
        """Return the bytes of a staged version's document, or of one of its shards.

        Raises:
            WeightSyncError: VERSION_UNKNOWN: it was given back, or has no such shard.
        """
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

        What it tells of other ranks is not read, nor what is of a session that is over.
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
            raise _unknown(f"{name} is not staged any more")
        return MappedSegment(*found)


def _unknown(what: str) -> WeightSyncError:
    return WeightSyncError(Reason.VERSION_UNKNOWN, f"{what}; the head asks for it again")
