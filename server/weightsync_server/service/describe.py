"""Tensors as replies show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.manifest import Manifest, TensorEntry

__all__ = ["tensor_page", "tensor_spec"]


def tensor_spec(tensor: TensorEntry) -> pb.TensorSpec:
    """Return one tensor as layouts tell it."""
    return pb.TensorSpec(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        begin=tensor.begin,
        end=tensor.end,
    )


def tensor_page(manifest: Manifest, first: int, size: int) -> Sequence[pb.TensorInfo]:
    """Return `size` tensors from position `first`, sorted by name."""
    rows = sorted(
        zip(manifest.layout.tensors, manifest.digests, strict=True), key=lambda row: row[0].name
    )
    return [
        pb.TensorInfo(spec=tensor_spec(tensor), shard=tensor.shard, digest=digest.hex())
        for tensor, digest in rows[first : first + size]
    ]
