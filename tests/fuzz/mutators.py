"""Mutations that keep enough of an input's form to get past its first check."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from weightsync.model.dtypes import DTYPE_BITS
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["mutate_file", "mutate_part"]

_SIZES = (0, 1, 2, 7, 8, 9, 255, (1 << 31) - 1, 1 << 32, (1 << 46), (1 << 63) - 1, 1 << 63)
_NAMES = ("", "a", "__metadata__", "../../etc/passwd", "a\0b", "a\nb", "\u202e", "\ud800", "-0")
_DTYPES = (*DTYPE_BITS, "F3", "bf16", "")
_JSON: tuple[Any, ...] = (None, True, -1, 0.5, 1e309, [], {}, "x", [[[[]]]], -0.0, 1 << 64)


def mutate_file(data: bytes, most: int, seed: int, blind: Callable[[bytes, int], bytes]) -> bytes:
    """Return another safetensors file; `blind` knows nothing of the form."""
    rng = random.Random(seed)
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.5:
        header = _mutate_header(header, rng) or header
    else:
        header = blind(header, max(len(header) + 16, 2)) if header else b"{}"
    if rng.random() < 0.2:
        body = body[: rng.randrange(len(body) + 1)] + bytes(rng.choice((0, 1, 8)))
    length = len(header) if rng.random() < 0.95 else rng.choice(_SIZES)
    return (length.to_bytes(8, "little") + header + body)[:most]


def _mutate_header(header: bytes, rng: random.Random) -> bytes:
    try:
        pairs = json.loads(header, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return b""
    if not isinstance(pairs, list) or not pairs:
        return b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    at = rng.randrange(len(pairs))
    name, value = pairs[at] if isinstance(pairs[at], tuple) else (str(pairs[at]), [])
    what = rng.randrange(5)
    if what == 0:
        pairs[at] = (rng.choice(_NAMES), value)
    elif what == 1:
        pairs.insert(rng.randrange(len(pairs) + 1), (name, value))
    elif what == 2 and len(pairs) > 1:
        del pairs[at]
    else:
        pairs[at] = (name, _mutate_value(value, rng))
    text = _encode(pairs)
    return text.encode("utf-8", "surrogatepass") + b" " * rng.choice((0, 0, 1, 7))


def _mutate_value(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, list) or not value:
        return rng.choice(_JSON)
    at = rng.randrange(len(value))
    if not isinstance(value[at], tuple):
        return [*value[:at], rng.choice(_SIZES), *value[at + 1 :]]
    key, inner = value[at]
    if key == "dtype":
        inner = rng.choice(_DTYPES)
    elif isinstance(inner, list) and inner and rng.random() < 0.8:
        inner = [rng.choice(_SIZES) if rng.random() < 0.5 else item for item in inner]
    else:
        inner = rng.choice(_JSON)
    return [*value[:at], (key, inner), *value[at + 1 :]]


def _encode(value: Any) -> str:
    # Pairs, so that a key may come twice.
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        return "{" + ",".join(f"{json.dumps(k)}:{_encode(v)}" for k, v in value) + "}"
    return json.dumps(value)


def mutate_part(data: bytes, most: int, seed: int, blind: Callable[[bytes, int], bytes]) -> bytes:
    """Return another serialised LayoutPart."""
    rng = random.Random(seed)
    try:
        part = pb.LayoutPart.FromString(data)
    except DecodeError:
        return blind(data, most)
    if not part.tensors:
        part.tensors.add(name="a", dtype="U8", shape=[1], begin=0, end=1)
    tensor = rng.choice(part.tensors)
    what = rng.randrange(7)
    if what == 0:
        tensor.name = rng.choice([name for name in _NAMES if name.isascii()])
    elif what == 1:
        tensor.dtype = rng.choice(_DTYPES)
    elif what == 2:
        tensor.shape[:] = [rng.choice(_SIZES) for _ in range(rng.choice((0, 1, 2, 40)))]
    elif what == 3:
        tensor.begin, tensor.end = rng.choice(_SIZES), rng.choice(_SIZES)
    elif what == 4:
        part.tensors.add().CopyFrom(tensor)
    elif what == 5:
        part.size_bytes, part.header_bytes = rng.choice(_SIZES), rng.choice(_SIZES)
    else:
        return blind(data, most)
    if rng.random() < 0.5:
        _mend(part)
    return part.SerializeToString()[:most]


def _mend(part: pb.LayoutPart) -> None:
    """Make the ranges those that the shapes ask for, so that only one thing is wrong."""
    end = 0
    for tensor in part.tensors:
        count = 1
        for dimension in tensor.shape:
            count *= dimension
        size = min(count * DTYPE_BITS.get(tensor.dtype, 8) // 8, 1 << 46)
        tensor.begin, tensor.end = end, end + size
        end += size
    part.header_bytes = 100
    part.size_bytes = min(108 + end, (1 << 64) - 1)
