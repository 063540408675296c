"""A trainer that has nothing but grpcio and the generated stubs: one call for a whole version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from benchmarks.floor import CLIENT_OPTIONS
from weightsync.digest import tensor_digest
from weightsync.layout import build_header
from weightsync.manifest import TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1.weightsync_pb2_grpc import WeightSyncStub

__all__ = ["Block", "push_stock"]


class Block(NamedTuple):
    """The tensors of one shard, which lie one after the other.

    Attributes:
        tensors: Name, dtype and shape of each.
        view: Their bytes.
    """

    tensors: Sequence[tuple[str, str, tuple[int, ...]]]
    view: memoryview


def push_stock(address: str, model: str, blocks: Sequence[Block], chunk_bytes: int) -> int:
    """Push and commit a version; return its number when it is verified and staged."""
    with grpc.insecure_channel(address, CLIENT_OPTIONS) as channel:
        stub: Any = WeightSyncStub(channel)
        reply: pb.PushWeightsResponse = stub.PushWeights(_messages(model, blocks, chunk_bytes))
    return reply.commit.version


def _messages(
    model: str, blocks: Sequence[Block], chunk_bytes: int
) -> Iterator[pb.PushWeightsRequest]:
    begin = pb.BeginPushRequest(model=model, shard_count=len(blocks))
    yield pb.PushWeightsRequest(begin=begin)
    for shard, block in enumerate(blocks):
        document, entries = build_header(block.tensors, shard)
        header = len(document).to_bytes(8, "little") + document
        yield _layout(shard, len(header), len(header) + len(block.view), entries)
        yield _chunk(shard, 0, header)
        digests = []
        for entry in entries:
            # Just before its bytes are copied: then they are read from memory once.
            digests.append(tensor_digest(block.view[entry.begin : entry.end]))
            for at in range(entry.begin, entry.end, chunk_bytes):
                data = bytes(block.view[at : min(at + chunk_bytes, entry.end)])
                yield _chunk(shard, len(header) + at, data)
        told = pb.ShardDigests(shard=shard, digests=b"".join(digests))
        yield pb.PushWeightsRequest(digests=told)
    yield pb.PushWeightsRequest(commit=pb.CommitPushRequest())


def _layout(
    shard: int, start: int, size: int, entries: Sequence[TensorEntry]
) -> pb.PushWeightsRequest:
    part = pb.LayoutPart(shard=shard, size_bytes=size, header_bytes=start - 8, last=True)
    part.shard_name = f"{shard}.safetensors"
    for entry in entries:
        part.tensors.add(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            begin=entry.begin,
            end=entry.end,
        )
    return pb.PushWeightsRequest(layout=part)


def _chunk(shard: int, offset: int, data: bytes) -> pb.PushWeightsRequest:
    message = pb.PushWeightsRequest()
    # Not through the constructor, which copies the bytes once more.
    message.chunk.shard, message.chunk.offset = shard, offset
    message.chunk.data = data
    return message
