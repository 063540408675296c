"""The messages of a PushWeights stream, made one by one as the link takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.shards import Shard, ShardDigester, ShardReader

__all__ = ["digest_messages", "join_message", "layout_messages", "shard_bytes"]

# Both well below the 1 MiB that the contract allows a message.
_LAYOUT_BYTES = 256 << 10
_DIGESTS = 16_384


def join_message(push_id: str) -> pb.PushWeightsRequest:
    """Return the first message of a stream."""
    return pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id))


def layout_messages(shard: Shard) -> Iterator[pb.PushWeightsRequest]:
    """Yield a shard's layout in parts of bounded size."""
    tensors = iter(shard.tensors)
    last = False
    while not last:
        request = pb.PushWeightsRequest()
        part = request.layout
        part.shard = shard.index
        part.shard_name = shard.entry.name
        part.size_bytes = shard.entry.size
        part.header_bytes = shard.entry.header_size
        size = 0
        while size < _LAYOUT_BYTES:
            tensor = next(tensors, None)
            if tensor is None:
                last = True
                break
            part.tensors.add(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                begin=tensor.begin,
                end=tensor.end,
            )
            size += 4 * len(tensor.name) + 64 + 10 * len(tensor.shape)
        part.last = last
        yield request


def shard_bytes(
    shard: Shard,
    reader: ShardReader,
    digester: ShardDigester,
    offset: int,
    chunk_bytes: int,
    on_bytes: Callable[[int], None],
) -> Iterator[pb.PushWeightsRequest]:
    """Yield a shard's bytes from `offset`, digesting on the way; each byte is read once.

    Bytes before `offset` that were not digested yet are read and digested, not sent.
    """
    position = min(digester.position, offset)
    while position < offset:
        stop = min(position + chunk_bytes, offset)
        digester.update(position, reader.read(position, stop))
        position = stop
    while position < shard.entry.size:
        stop = min(position + chunk_bytes, shard.entry.size)
        data = reader.read(position, stop)
        digester.update(position, data)
        # A new message each: assigning to a field copies the bytes once, the constructor twice,
        # and a message used again keeps every value it ever had.
        request = pb.PushWeightsRequest()
        chunk = request.chunk
        chunk.shard = shard.index
        chunk.offset = position
        chunk.data = data
        yield request
        on_bytes(len(data))
        position = stop
    # Empty tensors at the very end have no byte to go by.
    digester.update(position, b"")


def digest_messages(shard: Shard, digests: list[bytes]) -> Iterator[pb.PushWeightsRequest]:
    """Yield the digests of a shard's tensors."""
    for first in range(0, len(digests), _DIGESTS):
        part = b"".join(digests[first : first + _DIGESTS])
        yield pb.PushWeightsRequest(
            digests=pb.ShardDigests(shard=shard.index, first=first, digests=part)
        )
