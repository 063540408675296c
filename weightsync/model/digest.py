"""Digests that identify tensors, layouts and versions: xxh3-128 in its canonical byte order.

The canonical forms stand at the top of `weightsync.proto`. xxh3 guards against faults, not against
forgery (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


#: Length of every digest in bytes.
DIGEST_BYTES = 16

#: Lines that are joined and digested by one call: it holds the GIL for well under a millisecond.
_SLICE = 500
#: Digests a tensor that comes in pieces: `update(buffer)`, `digest()`.
TensorDigester = xxhash.xxh3_128


def tensor_digest(data: Buffer) -> bytes:
    """Return the 16-byte xxh3-128 of a buffer; the GIL is released while large ones are read."""
    return xxhash.xxh3_128_digest(data)


def lines_digest(lines: Iterable[str]) -> str:
    """Return the hexadecimal xxh3-128 of `lines`, each ended by one line feed."""
    state, rest = xxhash.xxh3_128(), iter(lines)
    while part := list(islice(rest, _SLICE)):
        part.append("")
        state.update("\n".join(part).encode("ascii"))
    return state.hexdigest()


def content_head(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Return a tensor's line of a signature; in that of a content digest, its digest follows."""
    return f"{json.dumps(name)} {dtype} {','.join(map(str, shape))}"


def content_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> str:
    """Return the identity of a version, the same for every encoding and order of its tensors."""
    ordered = sorted(tensors, key=lambda tensor: tensor[0].encode())
    return lines_digest(f"{content_head(*t[:3])} {t[3].hex()}" for t in ordered)


def signature_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """Return the digest of names, dtypes and shapes, which come in the order of the names."""
    return lines_digest(content_head(*tensor) for tensor in tensors)
