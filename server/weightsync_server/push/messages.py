"""Messages of a PushWeights stream as they come; the bytes of a chunk are not copied out."""

from __future__ import annotations

from typing import NamedTuple

from weightsync.v1 import weightsync_pb2 as pb

__all__ = ["ChunkView", "Message", "plain_chunk", "read_message"]

# Tags of the fields that a chunk is made of, by their numbers in the proto.
_CHUNK, _SHARD, _OFFSET, _DATA = 0x22, 0x08, 0x10, 0x1A
_MAX_SHARD = (1 << 32) - 1
#: The tenth byte of a number holds but one bit of it: what needs it is left to protobuf.
_MAX_VARINT_BYTES = 9


class ChunkView(NamedTuple):
    """A chunk whose data lies in the message that it came in.

    Attributes:
        shard: Index of the shard.
        offset: Of the first byte in the shard.
        data: A view; it keeps the whole message.
    """

    shard: int
    offset: int
    data: memoryview


Message = pb.PushWeightsRequest | ChunkView


def read_message(message: bytes) -> Message:
    """Return what the generated parser would, a chunk as a view of the message.

    Only what is one chunk and nothing else, its fields in order and each at most once, as every
    generated client writes it, becomes a view; protobuf reads the rest.

    Args:
        message: A serialised PushWeightsRequest.

    Raises:
        DecodeError: It is none.
    """
    return plain_chunk(message) or pb.PushWeightsRequest.FromString(message)


def plain_chunk(message: bytes) -> ChunkView | None:
    """Return the chunk that a message is, or None where protobuf must read it."""
    size = len(message)
    shard = offset = 0
    try:
        length, at = _number(message, 0, _CHUNK)
        if length != size - at:
            return None
        if message[at] == _SHARD:
            shard, at = _number(message, at, _SHARD)
        if message[at] == _OFFSET:
            offset, at = _number(message, at, _OFFSET)
        length, at = _number(message, at, _DATA)
    except (IndexError, ValueError):
        return None
    if length != size - at or shard > _MAX_SHARD:
        return None
    return ChunkView(shard, offset, memoryview(message)[at:])


def _number(message: bytes, at: int, tag: int) -> tuple[int, int]:
    """Return the number that follows a tag, and where what is behind it begins."""
    if message[at] != tag:
        raise ValueError
    number = 0
    for place in range(_MAX_VARINT_BYTES):
        byte = message[at + 1 + place]
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            if place and not byte:
                # Longer than it need be: how much of that is legal is protobuf's to say.
                break
            return number, at + 2 + place
    raise ValueError
