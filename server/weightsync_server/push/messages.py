"""Messages of a PushWeights stream as they come; the bytes of a chunk are not copied out."""

from __future__ import annotations

from typing import NamedTuple

from weightsync.v1 import weightsync_pb2 as pb

# Tags of the fields that a chunk is made of, by their numbers in the proto.
_CHUNK, _SHARD, _OFFSET, _DATA = 0x22, 0x08, 0x10, 0x1A
_MAX_SHARD = (1 << 32) - 1
#: The tenth byte of a number holds but one bit of it: what needs it is left to protobuf.
_MAX_VARINT_BYTES = 9


class ChunkView(NamedTuple):
    """A chunk in its message, which `data` keeps alive; `offset` is its place in the shard."""

    shard: int
    offset: int
    data: memoryview


Message = pb.PushWeightsRequest | ChunkView


def read_message(message: bytes) -> Message:
    """Return what the generated parser would, a chunk as a view of the message.

    Only a message in the form that generated clients write becomes a view; protobuf reads the rest.
    Raises DecodeError when it is no serialised PushWeightsRequest.
    """
    return plain_chunk(message) or pb.PushWeightsRequest.FromString(message)


def plain_chunk(message: bytes) -> ChunkView | None:
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
