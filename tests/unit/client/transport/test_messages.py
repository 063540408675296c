from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.model.digest import tensor_digest
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.source.shards import tensor_shard
from weightsync_client.source.tensors import Scratch, wrap
from weightsync_client.transport import messages
from weightsync_client.transport.messages import ShardDigester


@given(
    shard=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**64 - 1),
    parts=st.lists(st.binary(max_size=300), max_size=5),
)
def test_chunks_are_encoded_as_protobuf_does(shard: int, offset: int, parts: list[bytes]) -> None:
    request = pb.PushWeightsRequest()
    request.chunk.shard = shard
    request.chunk.offset = offset
    request.chunk.data = b"".join(parts)
    views = [memoryview(part) for part in parts]
    assert messages.encode_chunk(shard, offset, views) == request.SerializeToString()


@pytest.mark.parametrize("size", [127, 128, 16383, 16384, 1 << 20, 2 << 20])
def test_lengths_of_real_chunks(size: int) -> None:
    data = bytes(size)
    request = pb.PushWeightsRequest.FromString(messages.encode_chunk(300, 1 << 40, [data]))
    assert (request.chunk.shard, request.chunk.offset) == (300, 1 << 40)
    assert request.chunk.data == data


def test_layouts_and_digests_come_in_messages_below_the_limit() -> None:
    tensors = [wrap(f"{'x' * 900}.{i}", bytes([i % 256])) for i in range(3000)]
    shard = tensor_shard(tensors, 4, "s")
    parts = [m.layout for m in messages.layout_messages(shard)]
    assert len(parts) > 1
    assert max(part.ByteSize() for part in parts) <= 1 << 20
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert sum(len(part.tensors) for part in parts) == 3000
    digests = [tensor_digest(bytes([i % 256])) for i in range(40_000)]
    sent = [m.digests for m in messages.digest_messages(shard, digests)]
    assert max(m.ByteSize() for m in sent) <= 1 << 20
    assert b"".join(m.digests for m in sent) == b"".join(digests)
    assert [m.first * 16 for m in sent] == [0, *_sums(len(m.digests) for m in sent)][:-1]


def _sums(sizes: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for size in sizes:
        total += size
        sums.append(total)
    return sums


@pytest.mark.parametrize("offset", [0, 5, 200, 1000, 1500])
def test_bytes_before_the_offset_are_digested_and_not_sent(offset: int) -> None:
    tensors = [wrap("a", bytes(range(200)) * 5), wrap("b", b"12345678"), wrap("c", b"")]
    shard = tensor_shard(tensors, 0, "s")
    offset = min(offset, shard.entry.size)
    digester = ShardDigester(shard)
    counted: list[int] = []
    sent = list(
        messages.shard_bytes(shard, shard.open(Scratch()), digester, offset, 64, counted.append)
    )
    chunks = [pb.PushWeightsRequest.FromString(m).chunk for m in sent]
    whole = b"".join(shard.open(Scratch()).read(0, shard.entry.size))
    assert b"".join(c.data for c in chunks) == whole[offset:]
    assert [c.offset for c in chunks] == list(range(offset, shard.entry.size, 64))
    assert sum(counted) == shard.entry.size - offset
    held = {"a": bytes(range(200)) * 5, "b": b"12345678", "c": b""}
    assert digester.digests == [tensor_digest(held[t.name]) for t in shard.tensors]
