"""Checkpoints with random weights, made in seconds, and their files as writable tensors."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.gpu.spec import ModelSpec, TensorSpec
from weightsync.model.dtypes import torch_dtype
from weightsync.model.layout import build_header

__all__ = ["Files", "roomy", "write_checkpoint"]

#: As the client cuts pushes, so that segments made for the checkpoint fit the pushes too.
_SHARD_BYTES = 256 << 20
#: Random values that all tensors are cut from; a prime number, so that no two are alike.
_POOL = 16_777_259
_PRIME = 7919
_STD = 0.02
#: Of fp8 values, whose scales make weights of them as large as the others. The low four bits of
#: values below 128 can be anything, and none becomes a NaN.
_FP8_STD, _FP8_MOST = 30.0, 120.0
#: What a name ends with that is the inverse scale of a block of fp8 values.
_SCALES = "weight_scale_inv"
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


def write_checkpoint(folder: Path, spec: ModelSpec) -> None:
    """Write a checkpoint that vLLM loads; norms are one, everything else is random."""
    folder.mkdir(parents=True, exist_ok=True)
    pools = _Pools()
    (folder / "config.json").write_text(json.dumps(spec.config))
    shards = list(_cut(spec.tensors))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    places = {name: number for number, name in enumerate(spec.tensors)}

    def write(file: str, shard: list[str]) -> None:
        with (folder / file).open("wb") as out:
            out.write(_header({name: spec.tensors[name] for name in shard}))
            for name in shard:
                for part in pools.values(name, spec.tensors[name], places[name]):
                    out.write(part.numpy().data)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(write, names, shards))
    weights = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": spec.nbytes}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class _Pools:
    """Values that all tensors are cut from, as bytes."""

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        values = torch.empty(_POOL).normal_(std=_STD)
        fp8 = (values * (_FP8_STD / _STD)).clamp_(-_FP8_MOST, _FP8_MOST)
        scales = (values.abs() / _STD + 4) * (_STD / _FP8_STD / 4)
        self._values = {
            "BF16": values.bfloat16(),
            "F32": values,
            "F8_E4M3": fp8.to(torch.float8_e4m3fn),
        }
        self._scales = {"BF16": scales.bfloat16(), "F32": scales}
        self._ones = torch.ones(1, dtype=torch.bfloat16)

    def values(self, name: str, tensor: TensorSpec, number: int) -> Iterator[Any]:
        """Yield the bytes of a tensor in pieces; two numbers give two contents."""
        import torch

        if name.endswith("norm.weight"):
            yield self._ones.expand(tensor.elements).contiguous().view(torch.uint8)
            return
        pool = (self._scales if name.endswith(_SCALES) else self._values)[tensor.dtype]
        for part in _cycle(pool, number * _PRIME, tensor.elements):
            yield part.view(torch.uint8)


def _cut(tensors: Mapping[str, TensorSpec]) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name, tensor in tensors.items():
        if group and held + tensor.nbytes > _SHARD_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += tensor.nbytes
    yield group


def _header(tensors: Mapping[str, TensorSpec]) -> bytes:
    # As the client makes them: a push then fits the segments, and the layout, of the checkpoint.
    text, _ = build_header((name, *tensor) for name, tensor in tensors.items())
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
        tensors: By name.
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
                count, offset = end - begin, 8 + size + begin
                flat = torch.frombuffer(held, dtype=torch.uint8, count=count, offset=offset)
                dtype = torch_dtype(entry["dtype"])
                assert dtype is not None
                self.tensors[name] = flat.view(dtype).view(entry["shape"])

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
