"""What a version is: its layout and the digests of its tensors, and how both are written down.

A layout that exists has been checked (`weightsync.layout`), so code that holds one trusts it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

from weightsync.digest import content_digest, lines_digest

__all__ = ["Layout", "Manifest", "ShardEntry", "TensorEntry"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor and where its bytes lie.

    Attributes:
        name: Name in the checkpoint.
        dtype: safetensors dtype name, such as `BF16`.
        shape: Dimensions in elements; `()` for a 0-dim tensor.
        shard: Index of its shard.
        begin: First byte in the shard's data section.
        end: One past the last byte in the shard's data section.
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

    Attributes:
        name: File name for people; never used as a path.
        size: Bytes of the whole file: 8 + header_size + data.
        header_size: Bytes of the JSON header, without its 8-byte length.
    """

    name: str
    size: int
    header_size: int

    @property
    def data_start(self) -> int:
        """Offset of the data section in the file, in bytes."""
        return 8 + self.header_size


@dataclass(frozen=True)
class Layout:
    """Tensors and shards of a version; tensors are ordered by shard, begin, end and name."""

    shards: tuple[ShardEntry, ...]
    tensors: tuple[TensorEntry, ...]

    @cached_property
    def digest(self) -> str:
        """Digest of names, dtypes, shapes and places; 32 hexadecimal digits."""
        ordered = sorted(self.tensors, key=lambda tensor: tensor.name.encode())
        return lines_digest(
            f"{json.dumps(t.name)} {t.dtype} {','.join(map(str, t.shape))} "
            f"{t.shard} {t.begin} {t.end}"
            for t in ordered
        )

    @cached_property
    def signature(self) -> str:
        """Digest of names, dtypes and shapes alone: what a load plan depends on."""
        ordered = sorted(self.tensors, key=lambda tensor: tensor.name.encode())
        return lines_digest(
            f"{json.dumps(t.name)} {t.dtype} {','.join(map(str, t.shape))}" for t in ordered
        )

    @property
    def size(self) -> int:
        """Sum of the shard sizes in bytes."""
        return sum(shard.size for shard in self.shards)

    @cached_property
    def by_shard(self) -> tuple[tuple[TensorEntry, ...], ...]:
        """Tensors of each shard, in the order of their bytes."""
        groups: list[list[TensorEntry]] = [[] for _ in self.shards]
        for tensor in self.tensors:
            groups[tensor.shard].append(tensor)
        return tuple(tuple(group) for group in groups)


@dataclass(frozen=True)
class Manifest:
    """One encoding of a version: a layout and the digest of every tensor, in the same order."""

    layout: Layout
    digests: tuple[bytes, ...]

    @cached_property
    def content_digest(self) -> str:
        """Identity of the version, whatever its encoding; 32 hexadecimal digits."""
        return content_digest(
            (t.name, t.dtype, t.shape, digest)
            for t, digest in zip(self.layout.tensors, self.digests, strict=True)
        )

    @cached_property
    def manifest_digest(self) -> str:
        """Digest of this encoding: layout, shards and contents; 32 hexadecimal digits."""
        shards = (f"{json.dumps(s.name)} {s.size} {s.header_size}" for s in self.layout.shards)
        return lines_digest([self.layout.digest, self.content_digest, *shards])

    def to_json(self) -> bytes:
        """Return the stored form, read back by `from_json`."""
        document = {
            "format": 1,
            "shards": [[s.name, s.size, s.header_size] for s in self.layout.shards],
            "tensors": [
                [t.name, t.dtype, t.shape, t.shard, t.begin, t.end, digest.hex()]
                for t, digest in zip(self.layout.tensors, self.digests, strict=True)
            ],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes | memoryview) -> Manifest:
        """Read what `to_json` wrote. For the server's own files and memory, not for strangers.

        Raises:
            ValueError: The bytes are no such document.
        """
        try:
            document = json.loads(bytes(data))
            if document["format"] != 1:
                msg = f"unknown manifest format {document['format']!r}"
                raise ValueError(msg)
            shards = tuple(ShardEntry(*entry) for entry in document["shards"])
            rows = document["tensors"]
            tensors = tuple(
                TensorEntry(name, dtype, tuple(shape), shard, begin, end)
                for name, dtype, shape, shard, begin, end, _ in rows
            )
            digests = tuple(bytes.fromhex(row[6]) for row in rows)
        except (KeyError, TypeError, IndexError) as error:
            msg = f"not a manifest: {error!r}"
            raise ValueError(msg) from error
        return cls(Layout(shards, tensors), digests)
