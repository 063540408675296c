"""Delta shards: what must hold for any bytes, and mutations that keep the checksums right."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from weightsync.delta import DeltaError, apply_change, decode_tensor, kernels, parse_shard, patch
from weightsync.delta.coding import Coding, Counts, Positions, Values, total_bytes
from weightsync.delta.delta_manifest import DeltaManifest, Record, write_manifest
from weightsync.delta.delta_shard import header_of
from weightsync.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync.delta import ShardDelta, TensorChange

__all__ = ["EXPECT", "check_delta", "mutate_delta"]

#: The tensors of the base.
EXPECT: dict[str, tuple[str, tuple[int, ...]]] = {
    "layers.0.a": ("BF16", (64,)),
    "layers.0.b": ("U8", (1000,)),
    "layers.1.a": ("F32", (3, 5)),
    "layers.1.b": ("F64", ()),
    "layers.2.long": ("F16", (70, 100)),
    "layers.2.none": ("I16", (0, 4)),
}
_REFUSALS = (Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH, Reason.LAYOUT_INVALID)
_NUMBERS = (0, 1, 2, 7, 8, 63, 64, 65, 254, 255, 256, 7000, 65535, 1 << 31, (1 << 63) - 1)


def check_delta(blob: bytes) -> bool:
    """Return whether a receiver would use a delta shard; if so all kernels agree on it."""
    try:
        delta = parse_shard(blob, EXPECT)
    except DeltaError as error:
        _check_refusal(error)
        return False
    outcomes = []
    for name in kernels.available():
        os.environ[kernels.VARIABLE] = name
        kernels.chosen.cache_clear()
        outcomes.append([_use(change) for change in delta.changes.values()])
    assert all(outcome == outcomes[0] for outcome in outcomes), "kernels differ"
    return None not in outcomes[0]


def _use(change: TensorChange) -> bytes | None:
    """Return the new bytes, or None for a refusal, which leaves the base as it was."""
    base = np.arange(total_bytes(*EXPECT[change.name]), dtype=np.uint8)
    target = base.copy()
    try:
        done = decode_tensor(change, base)
    except DeltaError as error:
        _check_refusal(error)
        try:
            apply_change(change, target)
        except DeltaError:
            assert np.array_equal(target, base)
            return None
        raise AssertionError("applied what cannot be decoded") from error
    if done.index is not None:
        assert (np.diff(done.index) > 0).all()
        assert len(done.index) == change.nnz
    undo = patch(target, done)
    again = base.copy()
    apply_change(change, again)
    assert np.array_equal(target, again)
    patch(again, undo)
    assert np.array_equal(again, base)
    return target.tobytes()


def _check_refusal(error: DeltaError) -> None:
    assert error.reason in _REFUSALS, error.reason
    assert ";" in error.message
    assert len(error.message) < 1000, len(error.message)
    assert error.message.isascii(), ascii(error.message)
    assert error.message.isprintable(), ascii(error.message)


def mutate_delta(data: bytes, most: int, seed: int, blind: Callable[[bytes, int], bytes]) -> bytes:
    """Return another shard; checksums are mostly those of what it holds."""
    rng = random.Random(seed)
    try:
        delta = parse_shard(data, EXPECT)
    except DeltaError:
        return blind(data, most)
    if not delta.changes or rng.random() < 0.1:
        return blind(data, most)
    return _mutated(delta, rng, blind)[:most]


def _mutated(delta: ShardDelta, rng: random.Random, blind: Callable[[bytes, int], bytes]) -> bytes:
    records, sections = [], [b"", b""]
    victim = rng.choice(list(delta.changes))
    for change in delta.changes.values():
        record, streams = change.record, [change.positions, change.values]
        planes = [[bytes(plane.stored) for plane in stream] for stream in streams]
        if change.name == victim:
            if rng.random() < 0.6:
                _mutate_plane(planes, rng, blind)
            else:
                record = _mutate_record(record, rng)
        joined = [b"".join(stream) for stream in planes]
        sections = [section + stream for section, stream in zip(sections, joined, strict=True)]
        stored = tuple(len(plane) for stream in planes for plane in stream)
        checks = xxhash.xxh3_64_digest(joined[0]), xxhash.xxh3_64_digest(joined[1])
        records.append(dataclasses.replace(record, stored=stored, checks=checks))
    told = DeltaManifest(
        delta.index, delta.base_content_digest, delta.layout_digest, tuple(records)
    )
    manifest = write_manifest(told, zstd=rng.random() < 0.2)
    return (
        header_of(delta.index, len(manifest), *map(len, sections)) + manifest + b"".join(sections)
    )


def _mutate_plane(
    planes: list[list[bytes]], rng: random.Random, blind: Callable[[bytes, int], bytes]
) -> None:
    """Change a plane's bytes, mostly not their number."""
    at = rng.randrange(2)
    stream = planes[at] or planes[1]
    which = rng.randrange(len(stream))
    plane = stream[which]
    changed = blind(plane, len(plane) + 8) if plane else b"\0"
    if rng.random() < 0.8:
        changed = (changed + plane[len(changed) :])[: len(plane)]
    stream[which] = changed


def _mutate_record(record: Record, rng: random.Random) -> Record:
    """Change one field; the planes stay as they are."""
    facts: dict[str, Any] = {}
    what = rng.randrange(5)
    if what == 0:
        field = rng.choice(["changed", "skips", "large", "wide"])
        near = max(getattr(record.counts, field) + rng.choice([-1, 1]), 0)
        number = rng.choice([near, *_NUMBERS])
        facts["counts"] = dataclasses.replace(record.counts, **{field: number})
    elif what == 1:
        facts["coding"] = Coding(rng.choice(list(Positions)), rng.choice(list(Values)))
    elif what == 2:
        facts["packed"] = tuple(rng.random() < 0.3 for _ in record.packed)
    elif what == 3:
        facts["dtype"], facts["shape"] = rng.choice(list(EXPECT.values()))
    else:
        facts["counts"] = Counts(*(rng.choice(_NUMBERS) for _ in range(4)))
    return dataclasses.replace(record, **facts)
