"""A trainer that does by hand what the client does in the same-host hand-off, and so can err."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.unit.server.world import content, simple
from weightsync.shm.incoming_version import HANDLE_BYTES
from weightsync.shm.same_host import IpcPlacement, SameHostClient
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from tests.unit.server.world import Shard
    from weightsync.shm.same_host import WriteLease
    from weightsync.v1 import weightsync_pb2_grpc

__all__ = ["MODEL", "Trainer", "begun", "close_all"]

MODEL = "default"
_borrowers: list[SameHostClient] = []


def close_all() -> None:
    """End the connections of all trainers of this process."""
    while _borrowers:
        _borrowers.pop().close()


def begun(
    stub: weightsync_pb2_grpc.WeightSyncStub, shards: list[Shard], key: str = "", version: int = 0
) -> pb.BeginPushResponse:
    """Begin a push from this host and tell the layout of all its shards."""
    request = pb.BeginPushRequest(
        model=MODEL,
        version=version,
        idempotency_key=key,
        same_host=pb.SameHostSource(),
        shard_count=len(shards),
    )
    reply = stub.BeginPush(request, timeout=60)
    join = pb.PushWeightsRequest(join=pb.JoinPush(push_id=reply.push_id))
    parts = [part for shard in shards for part in shard.layout()]
    stub.PushWeights(iter([join, *parts]), timeout=60)
    return reply


class Trainer:
    """One push, begun, its layout told and its offer redeemed.

    Args:
        stub: Of the server.
        seed: Of the content.
        key: Idempotency key.
        version: Its number; 0: the next.
        shards: In place of those that the seed makes.
    """

    def __init__(
        self,
        stub: weightsync_pb2_grpc.WeightSyncStub,
        seed: int = 0,
        key: str = "",
        version: int = 0,
        shards: list[Shard] | None = None,
    ) -> None:
        self.stub = stub
        self.shards = shards or simple(seed, size=300_000)
        self.content = content(self.shards)
        self.reply = begun(stub, self.shards, key, version)
        offer = self.reply.same_host_offer
        self.borrower = SameHostClient(offer.socket, offer.secret)
        _borrowers.append(self.borrower)

    def write(self, lent: WriteLease, data: bytes) -> None:
        """Write from the begin of a shard's memory on."""
        assert os.pwrite(lent.fd, data, 0) == len(data)

    def hand(
        self, index: int, data: bytes | None = None, digests: list[bytes] | None = None
    ) -> None:
        """Hand a shard over, or other bytes or digests in its place."""
        shard = self.shards[index]
        lent = self.borrower.take_lease(index)
        self.write(lent, shard.data if data is None else data)
        self.borrower.give_back(lent)
        self.borrower.written(index, shard.digests if digests is None else digests)

    def placed(self, index: int) -> IpcPlacement:
        """Return where a shard would lie on a GPU that no server has."""
        shard = self.shards[index]
        start = len(shard.data) - max(entry.end for entry in shard.entries)
        places = [(0, entry.begin) for entry in shard.entries]
        return IpcPlacement(b"\7" * 16, shard.data[:start], [b"\1" * HANDLE_BYTES], places)

    def commit(self) -> pb.CommitPushResponse:
        """Commit."""
        request = pb.CommitPushRequest(push_id=self.reply.push_id, content_digest=self.content)
        return self.stub.CommitPush(request, timeout=60)
