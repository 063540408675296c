"""Chunks are read without a copy of their bytes, and otherwise exactly as protobuf reads them."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.messages import check_message, field, number
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.transport.messages import encode_chunk
from weightsync_server.push import read_message
from weightsync_server.push.messages import ChunkView

_longs = st.integers(0, (1 << 70) - 1) | st.sampled_from([0, 127, 128, (1 << 32) - 1, 1 << 32])
_spare = st.sampled_from([0] * 6 + [1, 3, 4, 8])
_more = st.sampled_from([0] * 6 + [-1, 1])
_fields = st.one_of(
    st.builds(number, st.integers(1, 20), _longs, spare=_spare),
    st.builds(field, st.integers(1, 20), st.binary(max_size=9), spare=_spare, more=_more),
    st.binary(max_size=4),
)
_plain = st.tuples(
    st.just(b"") | st.builds(number, st.just(1), _longs, spare=_spare),
    st.just(b"") | st.builds(number, st.just(2), _longs, spare=_spare),
    st.just(b"") | st.builds(field, st.just(3), st.binary(max_size=300), spare=_spare, more=_more),
).map(b"".join)
_bodies = _plain | st.lists(_fields, max_size=5).map(b"".join)
_chunks = st.builds(field, st.just(4), _bodies, spare=_spare, more=_more)
_messages = _chunks | st.lists(_chunks | _fields, max_size=3).map(b"".join)


@settings(max_examples=500)
@given(_messages)
@example(field(4, number(1, 0) + number(2, 0) + field(3, b"")))
@example(field(4, number(2, 1 << 64) + field(3, b"x")))
def test_every_message_is_what_protobuf_reads(message: bytes) -> None:
    check_message(message)


@given(
    st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 63) - 1), st.binary(min_size=1, max_size=99)
)
def test_what_clients_write_is_read_without_a_copy(shard: int, offset: int, data: bytes) -> None:
    request = pb.PushWeightsRequest(chunk=pb.Chunk(shard=shard, offset=offset, data=data))
    for message in (request.SerializeToString(), encode_chunk(shard, offset, [data])):
        assert check_message(message)
        view = read_message(message)
        assert isinstance(view, ChunkView)
        assert (view.shard, view.offset, bytes(view.data)) == (shard, offset, data)
        assert view.data.obj is message


def test_what_is_no_message_is_refused() -> None:
    whole = pb.PushWeightsRequest(chunk=pb.Chunk(shard=1, data=b"abc")).SerializeToString()
    for message in (whole[:-1], whole + b"\xff", b"\x22\x80"):
        with pytest.raises(DecodeError):
            read_message(message)
