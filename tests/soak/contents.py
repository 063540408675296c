"""What the soak pushes: contents by number, and how to know them again."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from pathlib import Path

from weightsync.model.digest import content_digest, tensor_digest
from weightsync.model.layout import build_header, parse_header

__all__ = ["KINDS", "CheckpointContents", "Contents", "MemoryContents", "digest_of"]

#: Dtype and shape of the in-memory engine's tensors; the first half lies in the first shard.
KINDS = {f"layer.{i}.weight": ("BF16", (64, 256)) for i in range(8)} | {
    "norm.weight": ("F32", (256,)),
    "step": ("I64", ()),
}

#: Contents that differ in few bytes from one another.
_FAMILY = 16

Shards = list[tuple[str, bytes]]


class Contents(ABC):
    """Contents of versions by number.

    Attributes:
        count: How many there are.
        known: Number by content digest, of all that were asked for.
    """

    count = 1 << 20

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    @abstractmethod
    def shards(self, number: int) -> Shards:
        """Return name and bytes of each safetensors file."""

    def sibling(self, number: int, rng: random.Random) -> int:
        """Return another content, like this one if there are such."""
        return (number + rng.randrange(1, self.count)) % self.count

    def digest(self, number: int) -> str:
        """Return the content digest, and know it from now on."""
        digest = digest_of([data for _, data in self.shards(number)])
        self.known[digest] = number
        return digest


class MemoryContents(Contents):
    """For the in-memory engine; content 0 is its checkpoint. Sixteen differ in few bytes only."""

    def sibling(self, number: int, rng: random.Random) -> int:
        """Return another of its family."""
        return number ^ rng.randrange(1, _FAMILY)

    def tensors(self, number: int) -> dict[str, bytes]:
        """Return the bytes of every tensor."""
        found = self._first(number // _FAMILY)
        rng = random.Random(number)
        if number % _FAMILY:
            for name, data in found.items():
                changed = bytearray(data)
                for _ in range(1 + len(data) // 100):
                    changed[rng.randrange(len(data))] ^= rng.randrange(1, 256)
                found[name] = bytes(changed)
        return found

    def _first(self, family: int) -> dict[str, bytes]:
        rng = random.Random(family)
        sizes = {"BF16": 2, "F32": 4, "I64": 8}
        found = {}
        for name, (dtype, shape) in KINDS.items():
            size = sizes[dtype]
            for dimension in shape:
                size *= dimension
            found[name] = rng.randbytes(size)
        return found

    def shards(self, number: int) -> Shards:
        """Return two files."""
        tensors = self.tensors(number)
        names = list(tensors)
        half = len(names) // 2
        return [
            (f"{index}.safetensors", _file({name: tensors[name] for name in group}))
            for index, group in enumerate((names[:half], names[half:]))
        ]


class CheckpointContents(Contents):
    """Folders with the checkpoints of one model, for a real vLLM.

    Args:
        folders: One for each content; the first is what vLLM loads.
    """

    def __init__(self, folders: list[Path]) -> None:
        super().__init__()
        self._folders = folders
        self.count = len(folders)

    def shards(self, number: int) -> Shards:
        """Return the folder's files."""
        paths = sorted(self._folders[number].glob("*.safetensors"))
        return [(path.name, path.read_bytes()) for path in paths]


def _file(tensors: dict[str, bytes]) -> bytes:
    header, _ = build_header((name, *KINDS[name]) for name in tensors)
    return len(header).to_bytes(8, "little") + header + b"".join(tensors.values())


def digest_of(shards: list[bytes]) -> str:
    """Return the content digest of safetensors files."""
    found = []
    for data in shards:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for tensor in parse_header(json.dumps(header).encode()):
            view = data[start + tensor.begin : start + tensor.end]
            found.append((tensor.name, tensor.dtype, tensor.shape, tensor_digest(view)))
    return content_digest(found)
