"""Shards whose checksums are right, made byte by byte: some an encoder never makes, some wrong."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import xxhash

from weightsync.delta.delta_shard import header_of
from weightsync.model.digest import tensor_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TENSORS", "legal", "wrong"]

#: Records, position streams and value streams.
_Parts = tuple[list[bytes], bytes, bytes]
#: Of the wrong shards' base, which is all zeros: dtype and shape by name.
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "w": ("BF16", (64,)),
    "x": ("BF16", (64,)),
    "y": ("F32", (64,)),
    "z": ("U8", (1000,)),
    "u": ("U8", (15,)),
}
_KIND = b"\x0e\x01\x40"
#: Element 0 changes by 1, as GAP8 and SM.
_POSITIONS, _VALUES = b"\x00", b"\x01\x00"


def _shard(records: Sequence[bytes], positions: bytes, values: bytes, digests: bytes) -> bytes:
    body = b"".join(records)
    manifest = struct.pack("<4sII32sI", b"WSD1", 0, len(records), digests, len(body)) + body
    sections = (manifest + xxhash.xxh3_64_digest(manifest), positions, values)
    return b"".join((header_of(0, *map(len, sections)), *sections))


def _record(
    name: bytes = b"\x00\x01w",
    kind: bytes = _KIND,
    digest: bytes = bytes(16),
    coding: bytes = b"\x22\x01\x00\x00\x00",
    packed: bytes = b"\x00",
    positions: bytes = _POSITIONS,
    values: bytes = _VALUES,
) -> bytes:
    checks = xxhash.xxh3_64_digest(positions) if coding[0] >> 4 else b""
    return name + kind + digest + coding + packed + checks + xxhash.xxh3_64_digest(values)


def _one(positions: bytes, values: bytes, coding: bytes, **more: Any) -> _Parts:
    """Return the parts of a shard of one record with these streams."""
    record = _record(coding=coding, positions=positions, values=values, **more)
    return [record], positions, values


def _manifests() -> dict[str, bytes]:
    """Return records that are wrong by themselves, whatever their streams hold."""
    return {
        "the first name shares a byte": _record(name=b"\x01\x01w"),
        "an empty name": _record(name=b"\x00\x00"),
        "a name that is not UTF-8": _record(name=b"\x00\x01\xff"),
        "a name of 1025 bytes": _record(name=b"\x00\x81\x08" + b"w" * 1025),
        "a number that is no shortest varint": _record(name=b"\x00\x81\x00w"),
        "a number of 2^63 and more": _record(name=b"\x00" + b"\xff" * 9 + b"\x01w"),
        "a tensor that the base does not have": _record(name=b"\x00\x01v"),
        "another dtype than the base's": _record(kind=b"\x0d\x01\x40"),
        "another shape than the base's": _record(kind=b"\x0e\x01\x41"),
        "more dimensions than the base's": _record(kind=b"\x0e\x02\x40\x01"),
        "an unknown dtype": _record(kind=b"\x16\x01\x40"),
        "the coding that is kept free": _record(coding=b"\x42\x01\x00\x00\x00"),
        "an unknown coding of values": _record(coding=b"\x23\x01\x00\x00\x00"),
        "values of elements without positions": _record(coding=b"\x02\x01\x00\x00\x00"),
        "dense values with positions": _record(coding=b"\x20"),
        "SM values of four bytes": _record(name=b"\x00\x01y", kind=b"\x11\x01\x40"),
        "no changed element": _record(coding=b"\x22\x00\x00\x00\x00"),
        "more changed elements than there are": _record(coding=b"\x22\x41\x00\x00\x00"),
        "more skips than fit": _record(coding=b"\x22\x01\x01\x00\x00"),
        "more large differences than changed ones": _record(coding=b"\x22\x01\x00\x02\x00"),
        "more wide differences than large ones": _record(coding=b"\x22\x01\x00\x00\x01"),
        "a seventh packed plane of six": _record(packed=b"\x40"),
        "a packed plane that is not smaller": _record(packed=b"\x01\x01"),
        "a packed plane of no bytes": _record(packed=b"\x01\x00"),
        "bytes after the last record": _record() + b"x",
        "a record that ends too soon": _record()[:-4],
    }


def _streams() -> dict[str, _Parts]:
    """Return shards whose streams contradict the counts in their records."""
    sm, two = b"\x22\x01\x00\x00\x00", b"\x22\x02\x00\x00\x00"
    large, wide = b"\x22\x01\x00\x01\x00", b"\x22\x01\x00\x01\x01"
    z: dict[str, Any] = {"name": b"\x00\x01z", "kind": b"\x01\x01\xe8\x07"}
    bits = bytes(124)
    return {
        "streams longer than the planes": ([_record()], _POSITIONS, _VALUES + b"\x00"),
        "streams shorter than the planes": ([_record()], _POSITIONS, _VALUES[:1]),
        "a name twice": ([_record(), _record(name=b"\x01\x00")], b"\x00\x00", _VALUES * 2),
        "names in the wrong order": (
            [_record(name=b"\x00\x01x"), _record()],
            b"\x00\x00",
            _VALUES * 2,
        ),
        "a position behind the last element": _one(b"\x40", _VALUES, sm),
        "a second position behind the last element": _one(b"\x3f\x00", b"\x00\x00", two),
        "a skip fewer than declared": _one(b"\x00\x05", b"v", b"\x21\x01\x01", **z),
        "a skip more than declared": _one(b"\xff\xff", b"v", b"\x21\x01\x01", **z),
        "a skip that comes last": _one(b"\x05\xff", b"v", b"\x21\x01\x01", **z),
        "a bitmap with a bit too few": _one(b"\x01" + bits, b"ab", b"\x31\x02", **z),
        "a bitmap with a bit too many": _one(b"\x07" + bits, b"ab", b"\x31\x02", **z),
        "a bitmap with a bit behind the last element": _one(
            b"\x00\x80", b"v", b"\x31\x01", name=b"\x00\x01u", kind=b"\x01\x01\x0f"
        ),
        "a sign behind the last element": _one(_POSITIONS, b"\x02\x00", sm),
        "a large difference behind the last element": _one(_POSITIONS, b"\x00\x80", sm),
        "a large difference without a magnitude": _one(_POSITIONS, b"\x00\x01", sm),
        "a magnitude without a large difference": _one(_POSITIONS, b"\x00\x00\x01", large),
        "a wide difference without its bytes": _one(_POSITIONS, b"\x00\x01\xff", large),
        "bytes of a wide difference that is none": _one(_POSITIONS, b"\x00\x01\x01\x01\x01", wide),
        "a wide magnitude of 256": _one(_POSITIONS, b"\x00\x01\xff\x00\x01", wide),
        "a wide magnitude of 32769": _one(_POSITIONS, b"\x00\x01\xff\x01\x80", wide),
    }


def wrong(base_digest: str, layout_digest: str, *, good: bool = False) -> list[dict[str, Any]]:
    """Return shards that differ from a good one in one meaning each; every checksum is right.

    Args:
        base_digest: Content digest of the base; 32 hexadecimal digits.
        layout_digest: Its layout signature; 32 hexadecimal digits.
        good: Return that good one in their place.
    """
    digests = bytes.fromhex(base_digest + layout_digest)
    manifests = {"good": _record()} if good else _manifests()
    cases = {what: ([one], _POSITIONS, _VALUES) for what, one in manifests.items()}
    if not good:
        cases |= _streams()
    shards = {what: _shard(*parts, digests) for what, parts in cases.items()}
    return [{"what": what, "shard": shard.hex()} for what, shard in shards.items()]


def _vector(what: str, names: Sequence[str], shard: bytes, before: Any, after: Any) -> Any:
    tensors = [
        {"name": n, "dtype": "BF16", "shape": [1], "base": before.hex(), "new": after.hex()}
        for n in names
    ]
    return {
        "what": what,
        "index": 0,
        "absolute": False,
        "exact": False,
        "tensors": tensors,
        "shard": shard.hex(),
    }


def legal(base_digest: str, layout_digest: str) -> list[dict[str, Any]]:
    """Return shards that ours never makes and every reader takes."""
    digests = bytes.fromhex(base_digest + layout_digest)
    before, far = bytes.fromhex("803f"), bytes.fromhex("80bf")
    found = []
    for sign in (1, 0):
        values = bytes([sign]) + b"\x01\xff\x00\x80"
        parts = _one(
            _POSITIONS,
            values,
            b"\x22\x01\x00\x01\x01",
            kind=b"\x0e\x01\x01",
            digest=tensor_digest(far),
        )
        what = f"a difference of 32768 with sign {sign}"
        found.append(_vector(what, ["w"], _shard(*parts, digests), before, far))
    near = bytes.fromhex("813f")
    names = ["layer.a", "layer.b", "layer.\N{LATIN SMALL LETTER A WITH DIAERESIS}"]
    records, shared = [], (0, 3, 6)
    for name, some in zip(names, shared, strict=True):
        rest = name.encode()[some:]
        head = bytes([some, len(rest)]) + rest
        digest = tensor_digest(near)
        records.append(_record(head, b"\x0e\x01\x01", digest, values=b"\x00\x00"))
    shard = _shard(records, _POSITIONS * 3, b"\x00\x00" * 3, digests)
    found.append(_vector("names that share less than they could", names, shard, before, near))
    return found
