"""What every way of bytes to the server is: it sends what it can, and says what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weightsync.model.manifest import TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.push_reasons import Streamed, TransferPath

if TYPE_CHECKING:
    from weightsync_client.source.shards import Shard


class ShardDigests(NamedTuple):
    """The tensors of one shard, in the order in which they lie there, and the digest of each."""

    tensors: tuple[TensorEntry, ...]
    digests: list[bytes]


class OpenedPush(NamedTuple):
    """A push that the server has opened.

    Attributes:
        chunk_bytes: Of a message, at most.
        layout_known: Whether the server knows the layout of all.
        progress: What the server has of each shard, by index.
        endpoints: Data ports to use, as the server names them; none: its own address.
        offer: Of the server's memory, to a process on the same host; None: there is none.
        writer: Which of several processes this is.
    """

    push_id: str
    chunk_bytes: int
    layout_known: bool
    progress: Mapping[int, pb.ShardProgress]
    endpoints: tuple[str, ...] = ()
    offer: pb.SameHostOffer | None = None
    writer: int = 0

    @classmethod
    def from_reply(
        cls, reply: pb.BeginPushResponse, chunk_bytes: int, writer: int = 0
    ) -> OpenedPush:
        return cls(
            reply.push_id,
            chunk_bytes,
            reply.layout_known,
            {progress.shard: progress for progress in reply.shards},
            tuple(reply.data_endpoints),
            reply.same_host_offer if reply.HasField("same_host_offer") else None,
            writer,
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """What transports did.

    Attributes:
        shards: Tensors and digests of the shards that the server took, by index.
        way: How they went; where they went several ways, the fastest of these.
        reason: Why some did not go the fastest way there is; None: all did.
        by_server: The server copied all of them from GPUs itself.
        progress: What the server has of the shards that are left over, by index, where that was
            asked for; None: what it had when the push was opened.
        left: Shards that were read of an iterable and that the server did not take.
    """

    shards: Mapping[int, ShardDigests] = field(default_factory=dict)
    way: TransferPath = TransferPath.STREAM
    reason: Streamed | None = None
    by_server: bool = False
    progress: Mapping[int, pb.ShardProgress] | None = None
    left: tuple[Shard, ...] = ()

    def plus(self, later: Sent) -> Sent:
        """Return what both did: this, and then another transport with the rest."""
        return Sent(
            shards={**self.shards, **later.shards},
            way=self.way if self.shards else later.way,
            reason=self.reason or later.reason,
            by_server=later.by_server and (self.by_server or not self.shards),
        )


class Transport(Protocol):
    """One way of bytes to the server, for one attempt of one push."""

    def send(self, opened: OpenedPush, shards: Iterable[Shard]) -> Sent:
        """Send what can go this way; the next transport gets the shards that are left over.

        Called once. `shards` are those that the server lacks, or of which it lacks a part. When
        this raises, the push has failed, or `cancel` was called.
        """

    def cancel(self) -> None:
        """End `send` from another thread, or before it is called."""
