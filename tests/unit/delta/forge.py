"""Delta shards with right checksums and wrong contents."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tests.unit.delta.cases import BASE_DIGEST, LAYOUT_DIGEST
from weightsync.delta.coding import Coding, Counts, Positions, Values
from weightsync.delta.delta_manifest import DeltaManifest, Record, write_manifest
from weightsync.delta.delta_shard import header_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["blob", "from_manifest", "record", "tensor"]


def record(
    positions: Sequence[bytes], values: Sequence[bytes], coding: Coding, counts: Counts, **more: Any
) -> Record:
    facts: dict[str, Any] = {
        "name": "w",
        "dtype": "BF16",
        "shape": (64,),
        "digest": bytes(16),
        "coding": coding,
        "counts": counts,
        "stored": tuple(len(plane) for plane in (*positions, *values)),
        "packed": (False,) * (len(positions) + len(values)),
        "checks": tuple(xxhash.xxh3_64_digest(b"".join(planes)) for planes in (positions, values)),
    }
    return Record(**(facts | more))


def from_manifest(
    manifest: bytes, positions: bytes = b"", values: bytes = b""
) -> NDArray[np.uint8]:
    """Return the shard with these sections, whatever they are."""
    sections = (manifest, positions, values)
    whole = b"".join((header_of(0, *map(len, sections)), *sections))
    return np.frombuffer(bytearray(whole), np.uint8)


def blob(
    records: Sequence[Record], positions: bytes = b"", values: bytes = b"", **more: Any
) -> NDArray[np.uint8]:
    manifest = DeltaManifest(0, BASE_DIGEST, LAYOUT_DIGEST, tuple(records))
    manifest = dataclasses.replace(manifest, **more)
    return from_manifest(write_manifest(manifest), positions, values)


def tensor(
    positions: Sequence[bytes],
    values: Sequence[bytes],
    counts: Counts,
    where: Positions = Positions.GAP8,
    what: Values = Values.SM,
    **more: Any,
) -> NDArray[np.uint8]:
    """Return a shard of one tensor with these planes; BF16 of 64 elements by default."""
    made = record(positions, values, Coding(where, what), counts, **more)
    return blob([made], b"".join(positions), b"".join(values))
