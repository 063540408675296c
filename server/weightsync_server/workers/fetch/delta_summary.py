"""What fetchers tell of delta shards, in few bytes: there may be 2,000,000 tensors."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from weightsync.model.digest import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CODINGS", "DeltaHeader", "TensorDelta", "pack_changes", "unpack_changes"]

#: How positions can be coded; a coding's number is its place.
CODINGS = ("dense", "gap16", "gap8", "bitmap")
_HEAD = struct.Struct(f"<I{DIGEST_BYTES}s{DIGEST_BYTES}s")
_ROW = struct.Struct(f"<IQB{DIGEST_BYTES}s")


class DeltaHeader(NamedTuple):
    """What a delta shard tells of itself.

    Attributes:
        shard: Index of the shard in its push.
        base_content_digest: Of the version that it changes; 32 hexadecimal digits.
        layout_digest: `Layout.signature` of the canonical layout.
    """

    shard: int
    base_content_digest: str
    layout_digest: str


class TensorDelta(NamedTuple):
    """One changed tensor.

    Attributes:
        tensor: Its place in the canonical layout.
        changed: Elements that the delta tells.
        coding: Number of its coding in `CODINGS`.
        digest: Of its full new bytes.
    """

    tensor: int
    changed: int
    coding: int
    digest: bytes


def pack_changes(header: DeltaHeader, changes: Iterable[TensorDelta]) -> bytes:
    """Return the bytes that `unpack_changes` reads."""
    base, layout = bytes.fromhex(header.base_content_digest), bytes.fromhex(header.layout_digest)
    return _HEAD.pack(header.shard, base, layout) + b"".join(_ROW.pack(*row) for row in changes)


def unpack_changes(blob: bytes) -> tuple[DeltaHeader, list[TensorDelta]]:
    """Return what `pack_changes` was given."""
    shard, base, layout = _HEAD.unpack_from(blob)
    rows = _ROW.iter_unpack(memoryview(blob)[_HEAD.size :])
    return DeltaHeader(shard, base.hex(), layout.hex()), [TensorDelta(*row) for row in rows]
