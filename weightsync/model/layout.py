"""All checks on untrusted layouts and safetensors headers, and the making of headers.

What layouts do wrong is LAYOUT_INVALID, and headers SHARD_INVALID, with the tensor and the reason.
Format: https://github.com/huggingface/safetensors#format. Stricter than the safetensors package,
which lets duplicate keys, a leading space, unknown inner keys and names with control characters
through.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.manifest import Layout, ShardEntry, TensorEntry

MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 2_000_000
MAX_NAME_BYTES = 1024
MAX_DIMS = 32
MAX_SHARD_BYTES = 1 << 46
_MAX_BITS = MAX_SHARD_BYTES * 8


def _bad_layout(text: str) -> WeightSyncError:
    return WeightSyncError(Reason.LAYOUT_INVALID, text)


def _bad_header(text: str) -> WeightSyncError:
    return WeightSyncError(Reason.SHARD_INVALID, text)


def _shown(name: str) -> str:
    return json.dumps(name if len(name) <= 100 else name[:97] + "...")


def _check_name(name: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise _bad_layout(
            f"tensor name {_shown(name)} is not valid UTF-8; rename the tensor"
        ) from None
    if not 1 <= size <= MAX_NAME_BYTES:
        raise _bad_layout(f"tensor name {_shown(name)} has {size} bytes; use 1 to {MAX_NAME_BYTES}")
    # What is not printable, such as U+202E, makes two names look alike in a log, or breaks it.
    if name == "__metadata__" or not name.isprintable():
        raise _bad_layout(
            f"tensor name {_shown(name)} is reserved or not printable; rename the tensor"
        )


def _check_tensor(tensor: TensorEntry) -> None:
    _check_name(tensor.name)
    bits = DTYPE_BITS.get(tensor.dtype)
    if bits is None:
        raise _bad_layout(
            f"tensor {_shown(tensor.name)} has unknown dtype {_shown(tensor.dtype)}; "
            f"use one of {' '.join(DTYPE_BITS)}"
        )
    if len(tensor.shape) > MAX_DIMS:
        raise _bad_layout(
            f"tensor {_shown(tensor.name)} has {len(tensor.shape)} dimensions; at most {MAX_DIMS}"
        )
    # Empty tensors too: other readers of the format overflow on their way to the zero.
    if min(tensor.shape, default=0) < 0 or math.prod(d or 1 for d in tensor.shape) >= _MAX_BITS:
        raise _bad_layout(
            f"tensor {_shown(tensor.name)} has the impossible shape {list(tensor.shape)}"
        )
    total_bits = math.prod(tensor.shape) * bits
    if total_bits % 8 or tensor.begin < 0 or tensor.end - tensor.begin != total_bits // 8:
        raise _bad_layout(
            f"tensor {_shown(tensor.name)} of dtype {tensor.dtype} and shape {list(tensor.shape)} "
            f"needs {total_bits / 8:g} bytes but its range is {tensor.begin} to {tensor.end}"
        )


def check_shard(shard: ShardEntry, tensors: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Return the tensors in the order of their bytes; they cover the data section exactly."""
    if not 2 <= shard.header_size <= MAX_HEADER_BYTES:
        raise _bad_layout(
            f"shard {_shown(shard.name)} has a header of {shard.header_size} bytes; "
            f"at most {MAX_HEADER_BYTES}"
        )
    if not shard.data_start <= shard.size <= MAX_SHARD_BYTES:
        raise _bad_layout(
            f"shard {_shown(shard.name)} has an impossible size of {shard.size} bytes"
        )
    ordered = sorted(tensors, key=lambda t: (t.begin, t.end, t.name))
    position = 0
    for tensor in ordered:
        _check_tensor(tensor)
        if tensor.begin != position:
            what = (
                "overlaps the one before" if tensor.begin < position else "leaves a gap before it"
            )
            raise _bad_layout(
                f"tensor {_shown(tensor.name)} begins at byte {tensor.begin} and {what}, "
                f"which ends at {position}"
            )
        position = tensor.end
    if shard.data_start + position != shard.size:
        raise _bad_layout(
            f"the tensors of shard {_shown(shard.name)} fill {position} bytes of data, "
            f"its size leaves {shard.size - shard.data_start}"
        )
    return tuple(ordered)


def check_count(tensors: int) -> None:
    if tensors > MAX_TENSORS:
        raise _bad_layout(f"the version holds {tensors} tensors; push at most {MAX_TENSORS}")


def check_version(shards: Sequence[ShardEntry], groups: Sequence[Sequence[TensorEntry]]) -> Layout:
    """Return the layout of a version from shards that `check_shard` has passed."""
    check_count(sum(map(len, groups)))
    tensors = tuple(tensor for group in groups for tensor in group)
    if not tensors:
        raise _bad_layout("the version holds no tensor; push at least one")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise _bad_layout(f"tensor {_shown(tensor.name)} is in the version twice")
        seen.add(tensor.name)
    return Layout(tuple(shards), tensors)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise _bad_header(f"the shard header holds the key {_shown(twice)} twice")
    return result


def _is_int(value: object) -> bool:
    # bool is an int in Python, not in a header.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _not_minus_zero(digits: str) -> int:
    if digits == "-0":
        raise ValueError(digits)
    return int(digits)


def _is_text(value: object) -> bool:
    try:
        # Escapes such as \ud800 make strings that are no text.
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _header_tensor(name: str, value: object, shard: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad_header(
            f"tensor {_shown(name)} in the shard header needs exactly dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    good = (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and len(shape) <= MAX_DIMS
        and all(map(_is_int, shape))
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(map(_is_int, offsets))
    )
    if not good:
        raise _bad_header(
            f"tensor {_shown(name)} in the shard header has an invalid dtype, shape or data_offsets"
        )
    return TensorEntry(name, dtype, tuple(shape), shard, offsets[0], offsets[1])


def parse_header(header: bytes | memoryview, shard: int = 0) -> list[TensorEntry]:
    """Return the tensors of a safetensors header, in the header's order.

    `header` is the JSON without its 8-byte length, at most 8 MiB. Ranges are not checked: pass the
    result to `check_shard`. `shard` is the index to put into the entries.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise _bad_header(f"the shard header has {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    raw = bytes(header)
    if not raw.startswith(b"{"):
        raise _bad_header("the shard header does not begin with '{'")
    # json would take UTF-16 and surrogates too, and -0 for a size.
    hook = _not_minus_zero if b"-0" in raw else None
    try:
        document = json.loads(raw.decode(), object_pairs_hook=_no_duplicates, parse_int=hook)
    except (ValueError, RecursionError):
        raise _bad_header("the shard header is not valid JSON") from None
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(map(_is_text, [*metadata, *metadata.values()])):
        raise _bad_header("__metadata__ in the shard header must map text to text")
    return [_header_tensor(name, value, shard) for name, value in document.items()]


def _described(t: TensorEntry) -> str:
    # The dtype is still any text.
    place = f"{list(t.shape)} at {t.begin} to {t.end}"
    return f"{_shown(t.name)} as {_shown(t.dtype)} {place}"


def check_header(header: bytes | memoryview, expected: Sequence[TensorEntry]) -> None:
    index = expected[0].shard if expected else 0
    found = sorted(parse_header(header, index), key=lambda t: (t.begin, t.end, t.name))
    for theirs, ours in zip(found, expected, strict=False):
        if theirs != ours:
            raise _bad_header(
                f"the shard header declares {_described(theirs)}, the layout {_described(ours)}"
            )
    if len(found) != len(expected):
        raise _bad_header(
            f"the shard header declares {len(found)} tensors, the layout {len(expected)}"
        )


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], shard: int = 0
) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """Return the header bytes (without length) and places of tensors packed in the given order.

    Spaces pad the header to a multiple of 8 bytes. `tensors` has name, dtype and shape of each.
    """
    document: dict[str, Any] = {}
    entries = []
    position = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        document[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        entries.append(TensorEntry(name, dtype, shape, shard, position, position + size))
        position += size
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    ordered = sorted(entries, key=lambda t: (t.begin, t.end, t.name))
    return header, tuple(ordered)


#: Characters of a name.
_SHOWN = 80


def unlike(name: str, given: tuple[str, Sequence[int]], wanted: tuple[str, Sequence[int]]) -> str:
    """Return a clause on a tensor and what the engine has; " or " joins several dtypes there."""
    shown = name if len(name) <= _SHOWN else name[: _SHOWN - 3] + "..."
    (dtype, shape), (wanted_dtype, wanted_shape) = given, wanted
    clause = (
        f"tensor {shown} is {dtype} {list(shape)}, the engine has {wanted_dtype} "
        f"{list(wanted_shape)}"
    )
    longer = len(shape) == len(wanted_shape) > 0 and shape[0] > wanted_shape[0]
    if longer and list(shape[1:]) == list(wanted_shape[1:]):
        clause += (
            f" (it has {shape[0]} rows, the engine has {wanted_shape[0]}: cut a vocabulary that is "
            "padded)"
        )
    return clause
