"""The service that the servers of an engine's other nodes call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from weightsync import __version__
from weightsync.errors import Reason, WeightSyncError
from weightsync.node.v1 import node_pb2 as pb
from weightsync.node.v1 import node_pb2_grpc
from weightsync_server.nodes.joined_node import JoinedNode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from weightsync_server.nodes.node_group import NodeGroup

__all__ = ["NodeServicer", "add_node_service"]

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
#: A node that is frozen, or cut off, counts as gone after this time, seconds: gRPC's own pings wait
#: behind what it does not read.
_SILENCE_S = 10.0
#: Highest rank that a node may say it is, so that strays are bounded.
_MAX_RANK = 65_535


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Lets nodes join, and sends them what they stage.

    Args:
        group: Those that have joined.
    """

    def __init__(self, group: NodeGroup) -> None:
        self._group = group

    async def Join(
        self, requests: AsyncIterator[pb.JoinRequest], context: Any
    ) -> AsyncIterator[pb.JoinResponse]:
        """Make the caller the server of a node until the call ends."""
        messages = aiter(requests)
        node = JoinedNode(await _hello(messages))
        self._group.join(node)
        logger.info(
            "the weightsync-server of node %d has joined from %s", node.rank, context.peer()
        )
        listening = asyncio.create_task(self._listen(messages, node))
        try:
            async for request in node.requests():
                yield request
            raise WeightSyncError(Reason.SHUTTING_DOWN, f"node {node.rank} {node.left}")
        finally:
            listening.cancel()
            self._group.part(node, "has gone")
            logger.warning("the weightsync-server of node %d %s", node.rank, node.left)

    async def ReadStaged(
        self, request: pb.ReadStagedRequest, context: Any
    ) -> AsyncIterator[pb.ReadStagedResponse]:
        """Send a document, or a shard."""
        del context
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
        self._group.part(node, "has gone")


async def _hello(requests: AsyncIterator[pb.JoinRequest]) -> int:
    """Return which node it is.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    first = await anext(requests, None)
    if first is None or not first.hello.node_rank:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, "a node says first which it is, from 1; set --node-rank"
        )
    if first.hello.node_rank > _MAX_RANK:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"node_rank is over {_MAX_RANK}; set --node-rank as vLLM has it there",
        )
    if first.hello.server_version != __version__:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"node {first.hello.node_rank} has weightsync {first.hello.server_version}, the head "
            f"{__version__}; install the same release on both",
        )
    return int(first.hello.node_rank)


def add_node_service(servicer: NodeServicer, server: grpc.aio.Server) -> None:
    """Serve it."""
    node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)
