"""Versions that change a little from one to the next, and the deltas between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.unit.server.world import Shard, Tensor, content, make_shard
from weightsync.delta import encode_shard
from weightsync.model.digest import tensor_digest
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import ShardEntry
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.model.manifest import Layout
    from weightsync.v1 import weightsync_pb2_grpc

__all__ = [
    "as_shard",
    "delta_begin",
    "delta_of",
    "delta_shard",
    "every_dtype",
    "layout_of",
    "pulled",
    "push_version",
    "stepped",
]


def every_dtype(seed: int = 0, shards: int = 3, elements: int = 600) -> list[Shard]:
    """Return a version with a tensor of every dtype in each of several shards, and odd ones."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(shards):
        tensors: list[Tensor] = [
            (f"s{index}.{dtype}", dtype, (elements,), random.bytes(elements * bits // 8))
            for dtype, bits in DTYPE_BITS.items()
        ]
        # Makes what follows begin at an odd address.
        tensors.append((f"s{index}.odd", "U8", (3,), random.bytes(3)))
        tensors.append((f"s{index}.w", "BF16", (100, 50), random.bytes(10_000)))
        tensors.append((f"s{index}.scalar", "F32", (), random.bytes(4)))
        tensors.append((f"s{index}.empty", "F16", (0, 7), b""))
        tensors.append((f"s{index}.frozen", "BF16", (500,), random.bytes(1000)))
        made.append(make_shard(index, tensors))
    return made


def _tensors(shard: Shard) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    start = 8 + shard.header_size
    return [
        (t.name, t.dtype, t.shape, shard.data[start + t.begin : start + t.end])
        for t in shard.entries
    ]


def stepped(shards: Sequence[Shard], seed: int, share: float = 0.02) -> list[Shard]:
    """Return the version after: some bytes of each tensor differ but for those called frozen."""
    random = np.random.default_rng(seed)
    made = []
    for shard in shards:
        tensors = []
        for name, dtype, shape, data in _tensors(shard):
            new = np.frombuffer(data, np.uint8).copy()
            if len(new) and "frozen" not in name:
                where = random.random(len(new)) < share
                new[where] ^= random.integers(1, 256, int(where.sum()), np.uint8)
            tensors.append((name, dtype, shape, new.tobytes()))
        made.append(make_shard(shard.index, tensors))
    return made


def layout_of(shards: Sequence[Shard]) -> Layout:
    """Return the canonical layout of a version."""
    entries = [ShardEntry(s.name, len(s.data), s.header_size) for s in shards]
    return check_version(entries, [shard.entries for shard in shards])


def as_shard(index: int, blob: bytes) -> Shard:
    """Return a safetensors blob as a trainer sends it."""
    size = int.from_bytes(blob[:8], "little")
    entry = ShardEntry("delta", len(blob), size)
    entries = check_shard(entry, parse_header(blob[8 : 8 + size], index))
    data = blob[8 + size :]
    digests = [tensor_digest(data[t.begin : t.end]) for t in entries]
    return Shard(index, blob, size, entries, digests, f"delta-{index}")


def delta_of(
    base: Sequence[Shard], new: Sequence[Shard], count: int = 2, *, zstd: bool = True
) -> list[Shard]:
    """Return the shards of the delta between two versions.

    Args:
        base: Before.
        new: After.
        count: Shards over which the tensors are spread, unlike those of the versions.
        zstd: Pack them.
    """
    before = {t[0]: t for shard in base for t in _tensors(shard)}
    after = {t[0]: t for shard in new for t in _tensors(shard)}
    items = [
        (name, dtype, shape, np.frombuffer(data, np.uint8), np.frombuffer(after[name][3], np.uint8))
        for name, (_, dtype, shape, data) in before.items()
    ]
    return [delta_shard(items[at::count], base, index=at, zstd=zstd) for at in range(count)]


def delta_shard(
    items: Sequence[tuple[str, str, tuple[int, ...], Any, Any]],
    base: Sequence[Shard],
    *,
    layout: Sequence[Shard] | None = None,
    index: int = 0,
    zstd: bool = False,
) -> Shard:
    """Return a delta of values before and after; `layout` None: the base has it."""
    encoded = encode_shard(
        items,
        zstd=zstd,
        base_content_digest=content(base),
        layout_digest=layout_of(layout or base).signature,
        index=index,
    )
    return as_shard(index, encoded.blob.tobytes())


def delta_begin(base: Sequence[Shard], **fields: Any) -> dict[str, Any]:
    """Return what the begin of a delta tells beside its version."""
    return {
        "kind": pb.PUSH_KIND_DELTA,
        "base_content_digest": content(base),
        **fields,
    }


def push_version(
    stub: weightsync_pb2_grpc.WeightSyncStub,
    shards: Sequence[Shard],
    commit: str,
    **begin: Any,
) -> pb.CommitPushResponse:
    """Push shards from wherever the server has them on, as a stock client does.

    Args:
        stub: Of the server.
        shards: In full or of a delta.
        commit: Content digest of the new version.
        **begin: Fields of the begin.
    """
    request = pb.BeginPushRequest(**{"model": "default", "shard_count": len(shards), **begin})
    begun = stub.BeginPush(request, timeout=30)
    if begun.HasField("committed"):
        return begun.committed
    offsets = {progress.shard: progress.received_bytes for progress in begun.shards}

    def messages() -> Iterator[pb.PushWeightsRequest]:
        yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=begun.push_id))
        for shard in shards:
            yield from shard.layout()
            yield from shard.chunks(2000, offsets.get(shard.index, 0))
            yield from shard.given()
        yield pb.PushWeightsRequest(commit=pb.CommitPushRequest(content_digest=commit))

    return stub.PushWeights(messages(), timeout=60).commit


def pulled(stub: weightsync_pb2_grpc.WeightSyncStub, version: int) -> list[bytes]:
    """Return the bytes of every shard of a version, as PullWeights sends them."""
    shards: dict[int, bytearray] = {}
    request = pb.PullWeightsRequest(model="default", version=version)
    for message in stub.PullWeights(request, timeout=60):
        if message.HasField("chunk"):
            data = shards.setdefault(message.chunk.shard, bytearray())
            assert message.chunk.offset == len(data)
            data += message.chunk.data
    return [bytes(shards[index]) for index in sorted(shards)]
