"""What a version is: its layout and the digests of its tensors, and how both are written down.

A layout that exists has been checked (`weightsync.model.layout`), so code that holds one trusts it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

from weightsync.model.digest import content_head, lines_digest

#: The largest version and epoch: the largest integer that every JSON reader keeps exactly.
MAX_VERSION = (1 << 53) - 1

_FORMAT = 2
#: Tensors that are sorted, written or read by one call: it holds the GIL for about a millisecond.
_SLICE = 500


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor and where its bytes lie.

    `dtype` is a safetensors name, such as `BF16`; `shape` counts elements. `begin` and `end`, which
    is one past the last, are bytes of the shard's data section.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One safetensors file of a version.

    `name` is for people, never a path. `size` is of the whole file; `header_size` is without the
    8-byte length.
    """

    name: str
    size: int
    header_size: int

    @property
    def data_start(self) -> int:
        return 8 + self.header_size


@dataclass(frozen=True)
class Layout:
    """Tensors and shards of a version; tensors are ordered by shard, begin, end and name."""

    shards: tuple[ShardEntry, ...]
    tensors: tuple[TensorEntry, ...]

    @cached_property
    def digest(self) -> str:
        """Digest of names, dtypes, shapes, places and headers' sizes; 32 hexadecimal digits."""
        tensors = (
            f"{json.dumps(t.name)} {t.dtype} {','.join(map(str, t.shape))} "
            f"{t.shard} {t.begin} {t.end}"
            for t in map(self.tensors.__getitem__, self.by_name)
        )
        # The same tensors may lie behind headers that are written in other ways.
        shards = (f"{at} {s.size} {s.header_size}" for at, s in enumerate(self.shards))
        return lines_digest(chain(tensors, shards))

    @cached_property
    def signature(self) -> str:
        """Digest of names, dtypes and shapes alone: what a load plan depends on."""
        return lines_digest(self.content_heads)

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)

    @cached_property
    def largest_first(self) -> tuple[int, ...]:
        """Indices of the shards by size: the order in which ranks read and the server digests."""
        return tuple(sorted(range(len(self.shards)), key=lambda at: -self.shards[at].size))

    @cached_property
    def by_name(self) -> tuple[int, ...]:
        """Indices of the tensors in the order of their names' UTF-8, which is that of `str`."""
        names = [tensor.name for tensor in self.tensors]
        runs = (
            sorted(range(at, min(at + _SLICE, len(names))), key=names.__getitem__)
            for at in range(0, len(names), _SLICE)
        )
        return tuple(heapq.merge(*runs, key=names.__getitem__))

    @cached_property
    def content_heads(self) -> tuple[str, ...]:
        """What stands before the digests in the lines of a content digest, in their order."""
        ordered = map(self.tensors.__getitem__, self.by_name)
        return tuple(content_head(t.name, t.dtype, t.shape) for t in ordered)

    @cached_property
    def by_shard(self) -> tuple[tuple[TensorEntry, ...], ...]:
        """Tensors of each shard, in the order of their bytes."""
        groups: list[list[TensorEntry]] = [[] for _ in self.shards]
        for tensor in self.tensors:
            groups[tensor.shard].append(tensor)
        return tuple(tuple(group) for group in groups)

    def to_json(self) -> bytes:
        return _lines(self, map(_row, self.tensors))

    @classmethod
    def from_json(cls, data: bytes | memoryview) -> Layout:
        """Read what `to_json` wrote, or raise ValueError. For our own memory, not for strangers."""
        with _reading(data, "layout") as (shards, rows):
            return cls(shards, tuple(map(_tensor, rows)))


@dataclass(frozen=True)
class Manifest:
    """One encoding of a version: a layout and the digest of every tensor, in the same order."""

    layout: Layout
    digests: tuple[bytes, ...]

    @cached_property
    def digests_by_shard(self) -> list[tuple[bytes, ...]]:
        """Digests of each shard's tensors, in the order of their bytes."""
        digests = iter(self.digests)
        return [tuple(islice(digests, len(group))) for group in self.layout.by_shard]

    @cached_property
    def content_digest(self) -> str:
        """Identity of the version, whatever its encoding; 32 hexadecimal digits."""
        if len(self.digests) != len(self.layout.tensors):
            raise ValueError(f"{len(self.digests)} digests of {len(self.layout.tensors)} tensors")
        ordered = map(self.digests.__getitem__, self.layout.by_name)
        pairs = zip(self.layout.content_heads, ordered, strict=True)
        return lines_digest(f"{head} {digest.hex()}" for head, digest in pairs)

    @cached_property
    def manifest_digest(self) -> str:
        """Digest of this encoding: layout, shards and contents; 32 hexadecimal digits."""
        shards = (f"{json.dumps(s.name)} {s.size} {s.header_size}" for s in self.layout.shards)
        return lines_digest([self.layout.digest, self.content_digest, *shards])

    def to_json(self) -> bytes:
        pairs = zip(self.layout.tensors, self.digests, strict=True)
        return _lines(self.layout, ([*_row(tensor), digest.hex()] for tensor, digest in pairs))

    @classmethod
    def from_json(cls, data: bytes | memoryview) -> Manifest:
        """Read what `to_json` wrote, or raise ValueError. For our own files, not for strangers."""
        with _reading(data, "manifest") as (shards, rows):
            pairs = [(_tensor(row), bytes.fromhex(digest)) for *row, digest in rows]
        tensors, digests = zip(*pairs, strict=True) if pairs else ((), ())
        return cls(Layout(shards, tensors), digests)


def _row(tensor: TensorEntry) -> list[object]:
    return [tensor.name, tensor.dtype, tensor.shape, tensor.shard, tensor.begin, tensor.end]


def _tensor(row: Sequence[Any]) -> TensorEntry:
    name, dtype, shape, shard, begin, end = row
    return TensorEntry(name, dtype, tuple(shape), shard, begin, end)


def _lines(layout: Layout, rows: Iterable[list[object]]) -> bytes:
    """Return a line of facts, then lines of tensors, short so that no call keeps the GIL long."""
    shards = [[s.name, s.size, s.header_size] for s in layout.shards]
    lines = [_encode({"format": _FORMAT, "shards": shards, "tensors": len(layout.tensors)})]
    rest = iter(rows)
    while part := list(islice(rest, _SLICE)):
        lines.append(_encode(part))
    return b"\n".join(lines)


@contextlib.contextmanager
def _reading(
    data: bytes | memoryview, what: str
) -> Iterator[tuple[tuple[ShardEntry, ...], Iterator[Any]]]:
    """Give the shards and the rows that `_lines` wrote, as many as it did, or raise ValueError."""
    lines = bytes(data).split(b"\n")
    count = 0

    def rows() -> Iterator[Any]:
        nonlocal count
        for line in islice(lines, 1, None):
            for row in json.loads(line):
                count += 1
                yield row

    try:
        facts = json.loads(lines[0])
        if facts["format"] != _FORMAT:
            raise ValueError(f"unknown {what} format {facts['format']!r}")
        yield tuple(ShardEntry(*entry) for entry in facts["shards"]), rows()
        if count != facts["tensors"]:
            raise ValueError(f"{count} of {facts['tensors']!r} tensors in a {what}")
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a {what}: {error!r}") from error


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
