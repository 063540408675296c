"""One push as a trainer makes it: in full or as a delta, at once or from where it was cut."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.soak.callers import MODEL, TIMEOUT_S
from tests.support.deltas import delta_begin, delta_of
from tests.support.stock import layout_part, push_messages
from tests.unit.server.world import Shard
from weightsync.errors import WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import ShardEntry
from weightsync.shm.same_host import SameHostClient
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.soak.contents import Contents, Shards
    from weightsync.v1 import weightsync_pb2_grpc

__all__ = ["CHUNK", "Push", "delta_push", "signature"]

#: Several chunks per shard.
CHUNK = 32 << 10


@dataclass
class Push:
    """What is the same in all its attempts.

    Attributes:
        version: Its number.
        digest: Content digest of the version.
        shards: What is sent.
        key: Idempotency key.
        fields: More fields of the begin.
        commit: Content digest that the commit tells; empty: none.
    """

    version: int
    digest: str
    shards: Shards
    key: str
    fields: dict[str, Any] = field(default_factory=dict)
    commit: str = ""

    def begin(self, epoch: int, *, here: bool = False) -> pb.BeginPushRequest:
        """Return the call that opens or joins it; `here`: what is written is on this host."""
        return pb.BeginPushRequest(
            same_host=pb.SameHostSource() if here else None,
            model=MODEL,
            version=self.version,
            idempotency_key=self.key,
            epoch=epoch,
            shard_count=len(self.shards),
            **self.fields,
        )

    def messages(self, epoch: int) -> list[pb.PushWeightsRequest]:
        """Return all of it on one stream, begin first, commit last, layouts before any bytes."""
        begin, *rest = push_messages(self.shards, self.version, chunk_bytes=CHUNK)
        begin.begin.CopyFrom(self.begin(epoch))
        rest[-1].commit.content_digest = self.commit
        rest.sort(key=lambda message: not message.HasField("layout"))
        return [begin, *rest]

    def rest(self, begun: pb.BeginPushResponse) -> Iterator[pb.PushWeightsRequest]:
        """Yield what the server still lacks, on a stream that joins it."""
        here = {progress.shard: progress.received_bytes for progress in begun.shards}
        yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=begun.push_id))
        for index, (name, data) in enumerate(self.shards):
            if index not in here:
                yield pb.PushWeightsRequest(layout=layout_part(index, name, data))
            for offset in range(here.get(index, 0), len(data), CHUNK):
                part = pb.Chunk(shard=index, offset=offset, data=data[offset : offset + CHUNK])
                yield pb.PushWeightsRequest(chunk=part)

    def hand_over(
        self, stub: weightsync_pb2_grpc.WeightSyncStub, begun: pb.BeginPushResponse
    ) -> pb.CommitPushResponse:
        """Write all shards into the memory that the server lends, and commit.

        Raises:
            grpc.RpcError: The server refused it or went away.
        """
        join = pb.PushWeightsRequest(join=pb.JoinPush(push_id=begun.push_id))
        layouts = [
            pb.PushWeightsRequest(layout=layout_part(index, name, data))
            for index, (name, data) in enumerate(self.shards)
        ]
        stub.PushWeights(iter([join, *layouts]), timeout=TIMEOUT_S)
        offer = begun.same_host_offer
        with contextlib.suppress(OSError, EOFError, WeightSyncError):
            borrower = SameHostClient(offer.socket, offer.secret)
            with contextlib.closing(borrower):
                for shard in _whole(self.shards):
                    lent = borrower.take_lease(shard.index)
                    os.pwrite(lent.fd, shard.data, 0)
                    borrower.give_back(lent)
                    borrower.written(shard.index, shard.digests)
        request = pb.CommitPushRequest(push_id=begun.push_id, content_digest=self.digest)
        return stub.CommitPush(request, timeout=TIMEOUT_S)


def delta_push(version: int, key: str, contents: Contents, base: int, number: int) -> Push:
    """Return the push of a content as a delta from another.

    Args:
        version: Its number.
        key: Idempotency key.
        contents: What is pushed.
        base: Number of the content that a committed version has.
        number: Of the new one.
    """
    before, after = (_whole(contents.shards(one)) for one in (base, number))
    delta = [(shard.name, shard.data) for shard in delta_of(before, after)]
    digest = contents.digest(number)
    return Push(version, digest, delta, key, delta_begin(before), digest)


def signature(shards: Shards) -> str:
    """Return the digest of the shards' layout: a server that knows it lets ranks read ahead."""
    whole = _whole(shards)
    entries = [
        ShardEntry(shard.name, len(shard.data), int.from_bytes(shard.data[:8], "little"))
        for shard in whole
    ]
    return check_version(entries, [shard.entries for shard in whole]).digest


def _whole(shards: Shards) -> list[Shard]:
    found = []
    for index, (name, data) in enumerate(shards):
        size = int.from_bytes(data[:8], "little")
        entries = check_shard(
            ShardEntry(name, len(data), size), parse_header(data[8 : 8 + size], index)
        )
        body = data[8 + size :]
        digests = [tensor_digest(body[entry.begin : entry.end]) for entry in entries]
        found.append(Shard(index, data, size, entries, digests, name))
    return found
