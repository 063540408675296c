"""The messages of a PushWeights stream, made one by one as the link takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.source.box_shards import BoxShard
from weightsync_client.source.shards import Part, Shard, ShardReader
from weightsync_client.transport.digester import ShardDigester

__all__ = [
    "Message",
    "box_messages",
    "declaration",
    "digest_messages",
    "encode_chunk",
    "heartbeat_message",
    "join_message",
    "layout_messages",
    "serialize",
    "shard_bytes",
]

#: A message of the stream; chunks come encoded.
Message = pb.PushWeightsRequest | bytes

# Both well below the 1 MiB that the contract allows a message.
_LAYOUT_BYTES = 256 << 10
_DIGESTS = 16_384
# Of a box with 32 dimensions at most 650 bytes.
_BOXES = 1024


def join_message(push_id: str, writer: int = 0) -> pb.PushWeightsRequest:
    """Return the first message of a stream, of one of several writers."""
    return pb.PushWeightsRequest(join=pb.JoinPush(push_id=push_id, writer=writer))


def heartbeat_message() -> pb.PushWeightsRequest:
    """Return the message that only says that the stream is alive."""
    return pb.PushWeightsRequest(heartbeat=pb.Heartbeat())


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


def declaration(shard: Shard, *, layout_known: bool) -> Iterator[pb.PushWeightsRequest]:
    """Yield what comes before a shard's bytes: its layout, and which boxes of it are sent."""
    if isinstance(shard, BoxShard):
        if not layout_known:
            yield from layout_messages(shard.whole)
        yield from box_messages(shard)
    elif not layout_known:
        yield from layout_messages(shard)


def box_messages(shard: BoxShard) -> Iterator[pb.PushWeightsRequest]:
    """Yield what a process declares of a shard, in parts of bounded size."""
    boxes = [(True, box) for box in shard.sent] + [(False, box) for box in shard.replicas]
    for first in range(0, max(len(boxes), 1), _BOXES):
        request = pb.PushWeightsRequest()
        part = request.boxes
        part.shard = shard.index
        for sent, one in boxes[first : first + _BOXES]:
            (part.sent if sent else part.replicas).add(
                tensor=one.tensor, offsets=one.box.offsets, sizes=one.box.sizes
            )
        part.last = first + _BOXES >= len(boxes)
        if part.last and shard.changed is not None:
            part.patch_bytes = shard.entry.size
        yield request


def shard_bytes(
    shard: Shard,
    reader: ShardReader,
    digester: ShardDigester,
    offset: int,
    chunk_bytes: int,
    on_bytes: Callable[[int], None],
) -> Iterator[bytes]:
    """Yield encoded chunks of a shard from `offset`, digesting on the way.

    Each byte is read once from memory: digested, then copied while it is still in the cache. Bytes
    before `offset` that were not digested yet are read and digested, not sent.
    """
    position = min(digester.position, offset)
    while position < offset:
        position, _ = _digested(reader, digester, position, min(position + chunk_bytes, offset))
    while position < shard.entry.size:
        begin = position
        stop = min(begin + chunk_bytes, shard.entry.size)
        position, parts = _digested(reader, digester, begin, stop)
        request = encode_chunk(shard.index, begin, parts)
        # Views of the source must not outlive its turn while the link is waited for.
        parts.clear()
        yield request
        on_bytes(stop - begin)
    # Empty tensors at the very end have no byte to go by.
    digester.update(position, b"")


def _digested(
    reader: ShardReader, digester: ShardDigester, begin: int, end: int
) -> tuple[int, list[Part]]:
    parts = reader.read(begin, end)
    for part in parts:
        digester.update(begin, part)
        begin += len(part)
    return begin, parts


def encode_chunk(shard: int, offset: int, parts: Sequence[Part]) -> bytes:
    """Return PushWeightsRequest(chunk=...) as protobuf encodes it, copying the data once.

    Through a message object the same bytes are copied three times.
    """
    size = sum(map(len, parts))
    fields = bytearray()
    for tag, value in ((0x08, shard), (0x10, offset)):
        if value:
            fields.append(tag)
            fields += _varint(value)
    if size:
        fields += b"\x1a" + _varint(size)
    return b"".join((b"\x22", _varint(len(fields) + size), fields, *parts))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def serialize(message: Message) -> bytes:
    """Return a message as it goes over the wire."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def digest_messages(shard: Shard, digests: list[bytes]) -> Iterator[pb.PushWeightsRequest]:
    """Yield the digests of a shard's tensors."""
    for first in range(0, len(digests), _DIGESTS):
        part = b"".join(digests[first : first + _DIGESTS])
        yield pb.PushWeightsRequest(
            digests=pb.ShardDigests(shard=shard.index, first=first, digests=part)
        )
