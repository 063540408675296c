"""A second reader of the format, written from delta-format.md alone and sharing no code.

It checks nothing and takes its time: where it and ours agree, the page says what the bytes are.
"""

from __future__ import annotations

import json

import zstandard

_WIDTHS = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8]
_BITS = [8, 8, 8, 8, 8, 8, 8, 8, 4, 6, 6, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64, 64]


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value += (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


def _bit(plane: bytes, at: int) -> int:
    return plane[at // 8] >> at % 8 & 1


def _positions(code: int, planes: list[bytes], n: int) -> list[int]:
    if code == 3:
        return [at for at in range(n) if _bit(planes[0], at)]
    entries = (
        [low + 256 * high for low, high in zip(*planes, strict=True)] if code == 1 else planes[0]
    )
    skip = 65535 if code == 1 else 255
    found, p = [], -1
    for entry in entries:
        if entry == skip:
            p += skip
        else:
            p += entry + 1
            found.append(p)
    return found


def _differences(planes: list[bytes], count: int) -> list[int]:
    signs, large, magnitudes, low, high = planes
    rest, wide = iter(magnitudes), zip(low, high, strict=True)
    found = []
    for k in range(count):
        m = next(rest) + 2 if _bit(large, k) else 1
        if m == 257:
            a, b = next(wide)
            m = a + 256 * b
        found.append(-m if _bit(signs, k) else m)
    return found


def apply(shard: bytes, tensors: dict[str, bytes]) -> dict[str, bytes]:
    """Return the tensors as they are after the shard."""
    size = int.from_bytes(shard[:8], "little")
    header = json.loads(shard[8 : 8 + size])
    sections = []
    for entry in header.values():
        begin, end = entry["data_offsets"]
        sections.append(_Cursor(shard[8 + size + begin : 8 + size + end]))
    manifest, positions, values = sections
    manifest.take(8)
    count = int.from_bytes(manifest.take(4), "little")
    manifest.take(32)
    size = int.from_bytes(manifest.take(4), "little")
    rest = manifest.data[manifest.at : -8]
    manifest = _Cursor(rest if len(rest) == size else zstandard.decompress(rest))
    result = dict(tensors)
    name = b""
    for _ in range(count):
        name = name[: manifest.varint()] + manifest.take(manifest.varint())
        result[name.decode()] = _record(manifest, positions, values, result[name.decode()])
    return result


def _record(manifest: _Cursor, positions: _Cursor, values: _Cursor, base: bytes) -> bytes:
    dtype, dimensions = manifest.take(2)
    elements = 1
    for _ in range(dimensions):
        elements *= manifest.varint()
    w = _WIDTHS[dtype]
    n = elements * _BITS[dtype] // 8 // w
    manifest.take(16)
    coding = manifest.take(1)[0]
    where, what = coding >> 4, coding & 15
    c = n if what == 0 else manifest.varint()
    s = manifest.varint() if where in (1, 2) else 0
    large, wide = (manifest.varint(), manifest.varint()) if what == 2 else (0, 0)
    bits = (c + 7) // 8
    first = {0: [], 1: [c + s, c + s], 2: [c + s], 3: [(n + 7) // 8]}[where]
    second = {0: [n * w], 1: [c] * w, 2: [bits, bits, large, wide, wide]}[what]
    packed = manifest.varint()
    plane_sizes = first + second
    stored = [
        manifest.varint() if packed >> at & 1 else size for at, size in enumerate(plane_sizes)
    ]
    manifest.take(16 if where else 8)
    planes = []
    for at, size in enumerate(stored):
        plane = (positions if at < len(first) else values).take(size)
        planes.append(zstandard.decompress(plane) if packed >> at & 1 else plane)
    if what == 0:
        return planes[0]
    places = _positions(where, planes[: len(first)], n)
    planes = planes[len(first) :]
    after = bytearray(base)
    differences = _differences(planes, c) if what == 2 else [0] * c
    for k, p in enumerate(places):
        if what == 2:
            bits = (int.from_bytes(base[2 * p : 2 * p + 2], "little") + differences[k]) % 65536
            after[2 * p : 2 * p + 2] = bits.to_bytes(2, "little")
        else:
            after[w * p : w * p + w] = bytes(plane[k] for plane in planes)
    return bytes(after)
