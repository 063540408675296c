"""What a trainer can do with nothing but grpcio and the generated stubs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import xxhash

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightsync.v1 import weightsync_pb2_grpc

__all__ = ["layout_part", "push_folder", "push_messages"]

CHUNK = 1 << 20


def layout_part(index: int, name: str, data: bytes) -> pb.LayoutPart:
    """Return the layout of a safetensors file, read with nothing but json."""
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    part = pb.LayoutPart(
        shard=index, shard_name=name, size_bytes=len(data), header_bytes=header_bytes, last=True
    )
    for tensor, entry in header.items():
        begin, end = entry["data_offsets"]
        part.tensors.add(
            name=tensor, dtype=entry["dtype"], shape=entry["shape"], begin=begin, end=end
        )
    return part


def _digests(part: pb.LayoutPart, data: bytes) -> pb.ShardDigests:
    ordered = sorted(part.tensors, key=lambda t: (t.begin, t.end, t.name))
    start = 8 + part.header_bytes
    return pb.ShardDigests(
        shard=part.shard,
        digests=b"".join(
            xxhash.xxh3_128_digest(data[start + t.begin : start + t.end]) for t in ordered
        ),
    )


def push_messages(
    shards: list[tuple[str, bytes]], version: int, *, chunk_bytes: int = CHUNK, **begin: object
) -> Iterator[pb.PushWeightsRequest]:
    """Yield everything that one stream needs: begin first, commit last.

    Args:
        shards: Name and bytes of each safetensors file.
        version: Its number; 0: the server's choice.
        chunk_bytes: Most bytes in a message.
        **begin: More fields of the begin.
    """
    request = pb.BeginPushRequest(version=version, shard_count=len(shards), **begin)  # type: ignore[arg-type]
    request.model = request.model or "default"
    yield pb.PushWeightsRequest(begin=request)
    for index, (name, data) in enumerate(shards):
        part = layout_part(index, name, data)
        yield pb.PushWeightsRequest(layout=part)
        for offset in range(0, len(data), chunk_bytes):
            message = pb.PushWeightsRequest()
            message.chunk.shard, message.chunk.offset = index, offset
            message.chunk.data = data[offset : offset + chunk_bytes]
            yield message
        yield pb.PushWeightsRequest(digests=_digests(part, data))
    yield pb.PushWeightsRequest(commit=pb.CommitPushRequest())


def push_folder(
    stub: weightsync_pb2_grpc.WeightSyncStub, folder: Path, version: int = 0
) -> pb.CommitPushResponse:
    """Push every safetensors file of a folder with one call."""
    shards = [(path.name, path.read_bytes()) for path in sorted(folder.glob("*.safetensors"))]
    return stub.PushWeights(push_messages(shards, version), timeout=120).commit
