"""Messages of a push: what reads them without copies must be protobuf's parser, but faster."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push import read_message
from weightsync_server.push.messages import ChunkView

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_message", "field", "mutate_message", "number"]

_CHUNK = 4
_NUMBERS = (0, 1, 127, 128, 1 << 21, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, 1 << 64)


def check_message(data: bytes) -> bool:
    """Return whether the fast way took a message; either way it says what protobuf says."""
    try:
        expected = pb.PushWeightsRequest.FromString(data)
    except DecodeError:
        _check_refused(data)
        return False
    found = read_message(data)
    if not isinstance(found, ChunkView):
        # Compared as bytes, which hold what this proto does not know as well.
        assert found.SerializeToString() == expected.SerializeToString()
        return False
    # A view has no room for anything else, so there must have been nothing else.
    chunk = pb.Chunk(shard=found.shard, offset=found.offset, data=bytes(found.data))
    assert pb.PushWeightsRequest(chunk=chunk).SerializeToString() == expected.SerializeToString()
    assert expected.HasField("chunk")
    return True


def _check_refused(data: bytes) -> None:
    try:
        found = read_message(data)
    except DecodeError:
        return
    raise AssertionError(f"read {found!r} from what protobuf refuses")


def varint(value: int, *, spare: int = 0) -> bytes:
    """Return a number as protobuf writes it, with bytes that it does not need."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    if spare:
        data[-1] |= 0x80
        data += b"\x80" * (spare - 1) + b"\0"
    return bytes(data)


def number(index: int, value: int, *, spare: int = 0) -> bytes:
    """Return a field that holds a number."""
    return varint(index << 3) + varint(value, spare=spare)


def field(index: int, data: bytes, *, spare: int = 0, more: int = 0) -> bytes:
    """Return a field that holds bytes, and says that there are `more`."""
    return varint(index << 3 | 2) + varint(max(0, len(data) + more), spare=spare) + data


def mutate_message(
    data: bytes, most: int, seed: int, blind: Callable[[bytes, int], bytes]
) -> bytes:
    """Return another message; half of them nearly a plain chunk."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return blind(data, most)
    fields = [number(1, rng.choice(_NUMBERS), spare=_spare(rng))] if rng.random() < 0.8 else []
    if rng.random() < 0.8:
        fields.append(number(2, rng.choice(_NUMBERS), spare=_spare(rng)))
    payload = blind(data[:40], 64) if data else b"x"
    fields.append(field(3, payload, spare=_spare(rng), more=rng.choice((0, 0, 0, 0, -1, 1))))
    if rng.random() < 0.2:
        fields.insert(rng.randrange(4), number(rng.randrange(1, 20), rng.choice(_NUMBERS)))
    if rng.random() < 0.1:
        rng.shuffle(fields)
    message = field(
        _CHUNK, b"".join(fields), spare=_spare(rng), more=rng.choice((0, 0, 0, 0, 0, -1, 1))
    )
    if rng.random() < 0.1:
        message += rng.choice((message, data, b"\x08\x01", b"\x23\x24"))
    return message[:most]


def _spare(rng: random.Random) -> int:
    return rng.choice((0, 0, 0, 0, 0, 0, 1, 3, 8))
