"""Shards of which a process holds slices, from memory or from several safetensors files.

`HuggingFaceStorageWriter(save_distributed=True)` has every rank write the parts that it holds into
a file of its own, and tells in the file's metadata, as DCP_SHARDING_INFO, where each begins:
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.manifest import ShardEntry, TensorEntry
from weightsync.model.tensor_slices import Box, problem_of
from weightsync_client.errors import refuse
from weightsync_client.source.shards import Shard, TensorReader, file_header, file_tensors
from weightsync_client.source.tensors import Read, Scratch, SourceTensor

if TYPE_CHECKING:
    from weightsync_client.source.sharded_tensors import BoxSource


class LocalSlice(NamedTuple):
    tensor: int
    box: Box
    bytes: SourceTensor


@dataclass(frozen=True, slots=True)
class SliceShard(Shard):
    """A process's part of a shard: its bytes are those of the slices that it sends, in a row.

    `whole` is what all processes together push; it has no bytes. `entry` and `tensors` describe the
    bytes of the `sent` slices; a lower writer sends the `replicas`. If `changed` is set, it has the
    digests of both, the bytes are those of a delta shard, and the slices are not read any more.
    """

    whole: Shard
    sent: tuple[LocalSlice, ...]
    replicas: tuple[LocalSlice, ...]
    changed: list[bytes] | None = None

    @property
    def data_start(self) -> int:
        """The server makes the header."""
        return 0

    def all_digests(self, sent: list[bytes]) -> list[bytes]:
        """Return the digests of all slices; `sent` are of those whose bytes were read as sent."""
        if self.changed is not None:
            return self.changed
        scratch = Scratch(views=True)
        return sent + [local.bytes.digest(scratch) for local in self.replicas]

    def as_changed(self, delta: Shard, digests: Mapping[str, bytes]) -> SliceShard:
        entry = ShardEntry(self.entry.name, delta.entry.size, 0)
        every = self.all_digests([digests[local.bytes.name] for local in self.sent])
        return replace(self, entry=entry, tensors=(), open=delta.open, changed=every)


def box_shards(shards: Iterable[Shard], sources: Sequence[BoxSource]) -> list[SliceShard]:
    """Return what a process sends of each shard of the whole version; `sources` are all tensors."""
    by_name = {source.whole.name: source for source in sources}
    return [
        _box_shard(shard, [by_name[tensor.name] for tensor in shard.tensors]) for shard in shards
    ]


def _box_shard(shard: Shard, sources: Sequence[BoxSource]) -> SliceShard:
    sent: list[LocalSlice] = []
    replicas: list[LocalSlice] = []
    for position, source in enumerate(sources):
        local = [LocalSlice(position, box, tensor) for box, tensor in source.boxes]
        (replicas if source.replica else sent).extend(local)
    entries, begin = [], 0
    for box in sent:
        tensor, end = box.bytes, begin + box.bytes.size
        entries.append(
            TensorEntry(tensor.name, tensor.dtype, tensor.shape, shard.index, begin, end)
        )
        begin = end
    tensors = tuple(box.bytes for box in sent)
    return SliceShard(
        shard.index,
        ShardEntry(shard.entry.name, begin, 0),
        tuple(entries),
        lambda scratch: TensorReader(b"", tensors, scratch),
        shard,
        tuple(sent),
        tuple(replicas),
    )


_INFO = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    box: Box
    tensor: SourceTensor


def assembled(files: Sequence[tuple[Path, Shard]]) -> list[SourceTensor] | None:
    """Return the whole tensors of a distributed checkpoint; None: no file holds a part of one.

    Each is put together when it is read, in host memory that is held for its turn. The format does
    not tell how large a tensor is: it ends where the last of its parts does. Parts that are
    missing, overlap or are of two dtypes are refused.
    """
    offsets = [_offsets(path, shard.entry.size) for path, shard in files]
    if not any(any(at) for of_file in offsets for at in of_file.values()):
        return None
    if len(files) == 1:
        raise _refused(
            files[0][0], "holds parts of tensors; push the folder with those of all ranks"
        )
    parts: dict[str, list[_Part]] = {}
    for (path, shard), of_file in zip(files, offsets, strict=True):
        for part in _parts(path, shard, of_file):
            parts.setdefault(part.tensor.name, []).append(part)
    return [_whole(name, of_tensor) for name, of_tensor in parts.items()]


def _refused(path: Path, problem: str) -> Exception:
    return refuse(Reason.LAYOUT_INVALID, f"{path} {problem}")


def _offsets(path: Path, size: int) -> Mapping[str, tuple[int, ...]]:
    """Return where the tensors of a file begin in the whole ones, as far as it tells."""
    header = file_header(path, size)
    if _INFO.encode() not in header:
        return {}
    try:
        info = json.loads(json.loads(header).get("__metadata__", {}).get(_INFO, "{}"))
        return {
            str(name): tuple(map(_index, about["saved_offsets"])) for name, about in info.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _refused(
            path, f"has {_INFO} that cannot be read; save the checkpoint again"
        ) from None


def _index(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _parts(path: Path, shard: Shard, offsets: Mapping[str, tuple[int, ...]]) -> Iterator[_Part]:
    for tensor in file_tensors(path, shard):
        at = offsets.get(tensor.name, (0,) * len(tensor.shape))
        if len(at) != len(tensor.shape):
            raise _refused(
                path,
                f"declares {len(at)} offsets of tensor {tensor.name!r}, which has "
                f"{len(tensor.shape)} dimensions; save the checkpoint again",
            )
        yield _Part(path, Box(at, tensor.shape), tensor)


def _whole(name: str, parts: Sequence[_Part]) -> SourceTensor:
    first = parts[0]
    boxes = [part.box for part in parts]
    for part in parts:
        if (part.tensor.dtype, len(part.box.sizes)) != (first.tensor.dtype, len(first.box.sizes)):
            raise _refused(
                part.path,
                f"holds tensor {name!r} as {part.tensor.dtype} with {len(part.box.sizes)} "
                f"dimensions, {first.path.name} as {first.tensor.dtype} with "
                f"{len(first.box.sizes)}; save the checkpoint again",
            )
    shape = tuple(max(ends) for ends in zip(*(box.ends for box in boxes), strict=True))
    problem = problem_of(shape, boxes)
    if not problem and DTYPE_BITS[first.tensor.dtype] % 8 and len(parts) > 1:
        problem = f"parts of {first.tensor.dtype} share bytes, which cannot be put together"
    if problem:
        raise _refused(
            first.path.parent,
            f"does not hold tensor {name!r} whole: {problem}; give the folder with the files of "
            "all ranks and of one save alone",
        )
    if len(parts) == 1:
        return first.tensor
    tensors = tuple((part.box, part.tensor) for part in parts)
    return SourceTensor(name, first.tensor.dtype, shape, partial(_open, tensors, shape))


def _open(
    parts: Sequence[tuple[Box, SourceTensor]], shape: tuple[int, ...], scratch: Scratch
) -> Read:
    import numpy as np

    width = DTYPE_BITS[parts[0][1].dtype] // 8
    whole = np.empty((*shape, width), np.uint8)
    for box, tensor in parts:
        read = tensor.open(scratch)
        whole[box.slices] = np.frombuffer(read(0, tensor.size), np.uint8).reshape(*box.sizes, width)
    view = whole.reshape(-1).data
    return lambda begin, end: view[begin:end]
