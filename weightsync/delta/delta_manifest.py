"""The manifest of a delta shard, as `docs/reference/delta-format.md` has it; bounds are checked."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from weightsync.delta.coding import (
    Broken,
    Coding,
    Counts,
    Positions,
    Values,
    check_counts,
    corrupt,
    element_width,
    invalid,
    pack_text,
    plane_sizes,
    total_bytes,
    unfit,
    unpack,
)
from weightsync.model.digest import DIGEST_BYTES
from weightsync.model.dtypes import DTYPES
from weightsync.model.layout import MAX_DIMS, MAX_NAME_BYTES

MAGIC = b"WSD1"
CHECK_BYTES = 8
_HEAD = struct.Struct(f"<4sII{DIGEST_BYTES}s{DIGEST_BYTES}sI")
#: More than any record takes: its name, its numbers, its digests.
_MAX_RECORD = 2048
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class Record:
    """One changed tensor; `digest` is the xxh3-128 of its full new bytes.

    `stored` has the size of each plane as stored, in bytes, positions first; `packed` tells which
    are zstd frames; `checks` are the xxh3-64 of the stored positions and of the stored values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes
    coding: Coding
    counts: Counts
    stored: tuple[int, ...]
    packed: tuple[bool, ...]
    checks: tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """What one delta shard holds, and of which base.

    Both digests have 32 hexadecimal digits: of the base's content, and of the canonical layout of
    both versions. `records` are in the order of their names' UTF-8.
    """

    index: int
    base_content_digest: str
    layout_digest: str
    records: tuple[Record, ...]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _shared(before: bytes, name: bytes) -> int:
    most = min(len(before), len(name), MAX_NAME_BYTES)
    return next((at for at in range(most) if before[at] != name[at]), most)


def _write_record(record: Record, before: bytes) -> Iterable[bytes]:
    name = record.name.encode()
    shared = _shared(before, name)
    counts = record.counts
    numbers = [shared, len(name) - shared]
    yield b"".join(map(_varint, numbers)) + name[shared:]
    yield bytes([_DTYPE_CODES[record.dtype], len(record.shape)])
    yield b"".join(map(_varint, record.shape)) + record.digest
    yield bytes([record.coding.positions << 4 | record.coding.values])
    if record.coding.values is not Values.DENSE:
        numbers = [counts.changed]
        if record.coding.positions is not Positions.BITMAP:
            numbers.append(counts.skips)
        if record.coding.values is Values.SM:
            numbers += [counts.large, counts.wide]
        yield b"".join(map(_varint, numbers))
    yield _varint(sum(1 << at for at, packed in enumerate(record.packed) if packed))
    pairs = zip(record.stored, record.packed, strict=True)
    yield b"".join(_varint(size) for size, packed in pairs if packed)
    if record.coding.positions is not Positions.NONE:
        yield record.checks[0]
    yield record.checks[1]


def write_manifest(manifest: DeltaManifest, *, zstd: bool = False) -> bytes:
    """Return the bytes of a manifest, its checksum included."""
    parts: list[bytes] = []
    before = b""
    for record in manifest.records:
        parts += _write_record(record, before)
        before = record.name.encode()
    records = b"".join(parts)
    head = _HEAD.pack(
        MAGIC,
        manifest.index,
        len(manifest.records),
        bytes.fromhex(manifest.base_content_digest),
        bytes.fromhex(manifest.layout_digest),
        len(records),
    )
    body = head + (pack_text(records) if zstd else records)
    return body + xxhash.xxh3_64_digest(body)


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise invalid("the delta's manifest ends within a record")
        self._at += size
        return self._data[self._at - size : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                # One spelling per number, and none above 2^63 - 1.
                if byte or shift == 7:
                    return value
            elif shift < 63:
                continue
            raise invalid("the delta's manifest holds a number that is not a shortest varint")

    @property
    def left(self) -> int:
        return len(self._data) - self._at


def _read_name(reader: _Reader, before: bytes) -> bytes:
    shared = reader.varint()
    if shared > len(before):
        raise invalid("a name in the delta's manifest shares more than its predecessor has")
    name = before[:shared] + bytes(reader.take(min(reader.varint(), MAX_NAME_BYTES + 1)))
    if len(name) > MAX_NAME_BYTES or name <= before:
        raise invalid("names in the delta's manifest are too long or not in ascending order")
    return name


def _read_kind(reader: _Reader) -> tuple[str, tuple[int, ...]]:
    code, dimensions = reader.byte(), reader.byte()
    if code >= len(DTYPES) or dimensions > MAX_DIMS:
        raise invalid(f"the delta's manifest holds dtype code {code} and {dimensions} dimensions")
    return DTYPES[code], tuple(reader.varint() for _ in range(dimensions))


def _read_coding(reader: _Reader) -> Coding:
    code = reader.byte()
    try:
        return Coding(Positions(code >> 4), Values(code & 15))
    except ValueError:
        raise invalid(f"the delta's manifest holds the unknown coding {code:#04x}") from None


def _read_counts(reader: _Reader, coding: Coding, elements: int) -> Counts:
    if coding.values is Values.DENSE:
        return Counts(elements)
    changed = reader.varint()
    skips = 0 if coding.positions is Positions.BITMAP else reader.varint()
    large, wide = (reader.varint(), reader.varint()) if coding.values is Values.SM else (0, 0)
    return Counts(changed, skips, large, wide)


def _read_sizes(reader: _Reader, sizes: tuple[int, ...]) -> tuple[list[int], tuple[bool, ...]]:
    mask = reader.varint()
    if mask >> len(sizes):
        raise invalid(f"the delta's manifest packs planes {mask:#x} of {len(sizes)}")
    packed = tuple(bool(mask >> at & 1) for at in range(len(sizes)))
    stored = [reader.varint() if p else size for p, size in zip(packed, sizes, strict=True)]
    for packed_size, size, is_packed in zip(stored, sizes, packed, strict=True):
        if is_packed and not 0 < packed_size < size:
            raise invalid(f"a plane of {size} bytes is packed into {packed_size}")
    return stored, packed


def _read_record(
    reader: _Reader, before: bytes, expect: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[Record, bytes]:
    raw = _read_name(reader, before)
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise invalid("a name in the delta's manifest is not UTF-8") from None
    dtype, shape = _read_kind(reader)
    known = expect.get(name)
    if known is None:
        raise unfit(f"the delta changes {name[:100]!a}, which the base does not hold")
    if known != (dtype, shape):
        raise unfit(
            f"the delta declares {dtype} {list(shape)} for {name[:100]!a}, but the base has "
            f"{known[0]} {list(known[1])}"
        )
    digest, coding = bytes(reader.take(DIGEST_BYTES)), _read_coding(reader)
    width = element_width(dtype)
    elements = total_bytes(dtype, shape) // width
    counts = _read_counts(reader, coding, elements)
    check_counts(coding, width, elements, counts)
    positions, values = plane_sizes(coding, width, elements, counts)
    stored, packed = _read_sizes(reader, positions + values)
    checks = (
        bytes(reader.take(CHECK_BYTES)) if positions else b"",
        bytes(reader.take(CHECK_BYTES)),
    )
    record = Record(name, dtype, shape, digest, coding, counts, tuple(stored), packed, checks)
    return record, raw


def _records(stored: memoryview, size: int, count: int) -> memoryview:
    """Return the bytes of the records, which were stored as they are or as one smaller frame."""
    if size > count * _MAX_RECORD or len(stored) > size:
        raise invalid(f"{count} records of {size} bytes are stored in {len(stored)}")
    if len(stored) == size:
        return stored
    try:
        return unpack(stored, size).data
    except Broken as error:
        raise invalid(f"the delta's manifest: {error}") from None


def read_manifest(
    data: memoryview, expect: Mapping[str, tuple[str, tuple[int, ...]]]
) -> DeltaManifest:
    """Return what `write_manifest` wrote, checked against every tensor of the base.

    Raises DeltaError: SHARD_INVALID, DIGEST_MISMATCH, or LAYOUT_INVALID for tensors not the base's.
    """
    if len(data) < _HEAD.size + CHECK_BYTES or data[: len(MAGIC)] != MAGIC:
        raise invalid("the shard's manifest does not begin as one of a delta")
    body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
    if xxhash.xxh3_64_digest(body) != check:
        raise corrupt("the delta's manifest does not match its checksum")
    _, index, count, base, layout, size = _HEAD.unpack(body[: _HEAD.size])
    if count > len(expect):
        raise unfit(f"the delta changes {count} tensors of a base that has {len(expect)}")
    reader = _Reader(_records(body[_HEAD.size :], size, count))
    records = []
    before = b""
    for _ in range(count):
        record, before = _read_record(reader, before, expect)
        records.append(record)
    if reader.left:
        raise invalid(f"the delta's manifest has {reader.left} bytes after its last record")
    return DeltaManifest(index, base.hex(), layout.hex(), tuple(records))
