"""Checkpoints with random weights, made in seconds, and their files as writable tensors."""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.gpu.shape import Shape
from weightsync.model.layout import build_header

__all__ = ["Files", "roomy", "write_checkpoint"]

#: As the client cuts pushes, so that segments made for the checkpoint fit the pushes too.
_SHARD_BYTES = 256 << 20
#: Random values that all tensors are cut from; a prime number, so that no two are alike.
_POOL = 16_777_259
_STD = 0.02
_THREADS = 8
_SPARE = 1 << 30


def roomy(nbytes: int) -> Path:
    """Return a folder that can hold so many bytes, memory first.

    Raises:
        OSError: There is none.
    """
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):  # noqa: S108 - for the speed
        if place.is_dir() and shutil.disk_usage(place).free > nbytes + _SPARE:
            return place
    msg = f"no room for {nbytes / 1e9:.1f} GB in /dev/shm or the temporary folder; make some"
    raise OSError(msg)


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Write a checkpoint that vLLM loads; norms are one, everything else is random."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    pool = torch.empty(_POOL, dtype=torch.bfloat16).normal_(std=_STD)
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    (folder / "config.json").write_text(json.dumps(shape.config))
    shards = list(_cut(shape.tensors))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    places = {name: number for number, name in enumerate(shape.tensors)}

    def write(file: str, shard: list[str]) -> None:
        sizes = {name: math.prod(shape.tensors[name]) for name in shard}
        with (folder / file).open("wb") as out:
            out.write(_header({name: shape.tensors[name] for name in shard}))
            for name, size in sizes.items():
                source = ones if name.endswith("norm.weight") else pool
                for part in _cycle(source, places[name] * 7919, size):
                    out.write(part.view(torch.uint8).numpy().data)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(write, names, shards))
    weights = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": shape.nbytes}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _cut(tensors: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name, shape in tensors.items():
        size = 2 * math.prod(shape)
        if group and held + size > _SHARD_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    yield group


def _header(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    # As the client makes them: a push then fits the segments, and the layout, of the checkpoint.
    text, _ = build_header((name, "BF16", shape) for name, shape in tensors.items())
    return len(text).to_bytes(8, "little") + text


def _cycle(source: Any, start: int, size: int) -> Iterator[Any]:
    """Yield `size` elements in pieces, from the start again at the end of the source."""
    at = start % len(source)
    while size:
        part = source[at : at + size]
        yield part
        size -= len(part)
        at = 0


class Files:
    """The safetensors files of a folder as tensors that lie in the page cache.

    Args:
        folder: Which.
        writable: Whether writes to the tensors reach the files.

    Attributes:
        tensors: bfloat16, by name.
    """

    def __init__(self, folder: Path, *, writable: bool = False) -> None:
        import torch

        self.tensors: dict[str, Any] = {}
        # torch.frombuffer does not keep what it reads from alive.
        self._maps: list[mmap.mmap] = []
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("r+b" if writable else "rb") as opened:
                held = mmap.mmap(opened.fileno(), 0, access=access)
            self._maps.append(held)
            size = int.from_bytes(held[:8], "little")
            entries = json.loads(held[8 : 8 + size])
            for name, entry in entries.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                flat = torch.frombuffer(
                    held, dtype=torch.bfloat16, count=(end - begin) // 2, offset=8 + size + begin
                )
                self.tensors[name] = flat.view(entry["shape"])

    def fill(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy tensors of any device into the files, several at a time."""

        def copy(pair: tuple[str, Any]) -> None:
            self.tensors[pair[0]].copy_(pair[1])

        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(copy, tensors))

    def close(self) -> None:
        """Unmap; the tensors must not be used any more."""
        self.tensors.clear()
        for held in self._maps:
            held.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
