"""Sets of a layout's tensor names as short texts: one bit per name, in the order of the names.

Ranks and server tell each other such sets in JSON of bounded size. The order depends on the names
alone, so that ranks which hold different parts of a model number them alike. What a layout has in
runs, such as the layers of a pipeline stage, takes a few bytes; 40,000 names at random 7 kB.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Iterable

#: Most bytes of a set that are unpacked: 8 million names.
_MAX_BYTES = 1 << 20


def pack(chosen: Collection[str], names: Iterable[str]) -> str:
    """Return a set of some of a layout's `names`, in any order, as a text."""
    ordered = sorted(names)
    bits = bytearray(-(-len(ordered) // 8))
    for place, name in enumerate(ordered):
        if name in chosen:
            bits[place // 8] |= 1 << place % 8
    return _text(bits)


def unpack(text: str, names: Iterable[str]) -> frozenset[str]:
    """Return the names of a set of `pack` or `common`; `names` are all of the layout, unordered.

    Raises ValueError if it is no such set.
    """
    ordered = sorted(names)
    bits = _bits(text)
    if len(bits) != -(-len(ordered) // 8):
        raise ValueError(f"a set over {len(bits)} bytes of names; there are {len(ordered)} names")
    return frozenset(
        name for place, name in enumerate(ordered) if bits[place // 8] >> place % 8 & 1
    )


def common(texts: Iterable[str]) -> str:
    """Return what one or more sets have in common; ValueError: they are not of the same names."""
    sets = [_bits(text) for text in texts]
    if len({len(bits) for bits in sets}) != 1:
        msg = f"sets over {sorted(len(bits) for bits in sets)} bytes of names; not the same names"
        raise ValueError(msg)
    shared = int.from_bytes(sets[0])
    for bits in sets[1:]:
        shared &= int.from_bytes(bits)
    return _text(shared.to_bytes(len(sets[0])))


def _text(bits: bytes | bytearray) -> str:
    return base64.b64encode(zlib.compress(bits)).decode()


def _bits(text: str) -> bytes:
    try:
        inflate = zlib.decompressobj()
        bits = inflate.decompress(base64.b64decode(text, validate=True), _MAX_BYTES)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"not a set of names ({error})") from error
    if not inflate.eof:
        raise ValueError("not a set of names, or one of too many")
    return bits
