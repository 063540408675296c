"""What requests name and how replies show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightsync.model.manifest import Layout, Manifest, TensorEntry
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.serving import ServingState
    from weightsync_server.catalog.table import VersionTable

__all__ = ["chosen", "layout_parts", "tensor_page", "tensor_spec"]

#: Tensors of one message: well below 1 MiB even with the longest names.
_PART = 500


def chosen(table: VersionTable, serving: ServingState, version: int) -> VersionRecord:
    """Return the version that a request wants to read; 0 stands for the live one.

    Raises:
        WeightSyncError: VERSION_UNKNOWN; PUSH_INCOMPLETE: only an engine's memory has it by now.
    """
    if not version and not serving.live:
        raise WeightSyncError(
            Reason.VERSION_UNKNOWN,
            f"model {table.name} has no live version yet; name a version, or apply one first",
        )
    record = table.get(version or serving.live)
    if record.in_place:
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"version {record.version} is live in an engine's memory alone until its trainer has "
            "pushed it; read it then, or the version before",
            retry_after_s=1.0,
        )
    return record


def tensor_spec(tensor: TensorEntry) -> pb.TensorSpec:
    """Return one tensor as layouts tell it."""
    return pb.TensorSpec(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        begin=tensor.begin,
        end=tensor.end,
    )


def layout_parts(layout: Layout, shard: int) -> Iterator[pb.LayoutPart]:
    """Yield what a stream tells of a shard before its bytes, also of one without a tensor."""
    entry, tensors = layout.shards[shard], layout.by_shard[shard]
    for first in range(0, max(len(tensors), 1), _PART):
        yield pb.LayoutPart(
            shard=shard,
            shard_name=entry.name,
            size_bytes=entry.size,
            header_bytes=entry.header_size,
            tensors=[tensor_spec(tensor) for tensor in tensors[first : first + _PART]],
            last=first + _PART >= len(tensors),
        )


def tensor_page(manifest: Manifest, first: int, size: int) -> Sequence[pb.TensorInfo]:
    """Return `size` tensors from position `first`, sorted by name; it looks at no others."""
    tensors, digests = manifest.layout.tensors, manifest.digests
    return [
        pb.TensorInfo(
            spec=tensor_spec(tensors[at]), shard=tensors[at].shard, digest=digests[at].hex()
        )
        # Sorted off the event loop when the manifest was made: its digests need the order.
        for at in manifest.layout.by_name[first : first + size]
    ]
