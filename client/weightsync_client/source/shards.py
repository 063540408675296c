"""Shards as the wire wants them: a checked layout, and bytes that can be read from any offset."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.checkpoint_folder import CheckpointFolder, open_checkpoint, read_header
from weightsync.model.layout import (
    MAX_HEADER_BYTES,
    build_header,
    check_count,
    check_shard,
    check_version,
    parse_header,
)
from weightsync.model.manifest import Layout, ShardEntry, TensorEntry
from weightsync_client.errors import ClientError, invalid, refuse, typed_errors
from weightsync_client.source.tensors import Read, Scratch, SourceTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


# A header entry: its name as JSON, and this much for dtype, shape, offsets and punctuation.
_ENTRY_BYTES = 160


#: Bytes of a source.
Part = bytes | memoryview

#: Takes bytes of a tensor: its name, their offset in it, and they.
Keep = Callable[[str, int, memoryview], None]


class ByteSink(Protocol):
    """Keeps the bytes of every tensor that is sent."""

    def keep(self, name: str, offset: int, piece: memoryview) -> None:
        """Take bytes of one tensor as they are sent."""

    def copies(self, name: str) -> bool:
        """Whether it takes the whole tensor where that lies when its first bytes are told."""


class ShardReader(Protocol):
    def read(self, begin: int, end: int) -> list[Part]:
        """Return bytes begin to end of the shard, in parts that are not copied where possible."""

    def close(self) -> None:
        """Let go of the source."""


@dataclass(frozen=True, slots=True)
class _Described:
    """What is known of a shard without its bytes; its tensors are in the order of their bytes."""

    index: int
    entry: ShardEntry
    tensors: tuple[TensorEntry, ...]

    @property
    def data_start(self) -> int:
        return self.entry.data_start


@dataclass(frozen=True, slots=True)
class Shard(_Described):
    open: Callable[[Scratch], ShardReader]


def _unreadable(path: Path, error: OSError) -> ClientError:
    return invalid(f"{path} cannot be read: {error.strerror}; check the path")


class _FileReader:
    # pread gives one copy straight from the page cache; a mapping would die of SIGBUS when the file
    # shrinks.
    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(path, error) from None
        self._size = size

    def read(self, begin: int, end: int) -> list[Part]:
        data = os.pread(self.fd, end - begin, begin)
        if len(data) != end - begin:
            raise refuse(
                Reason.SHARD_INVALID,
                f"{self._path} became shorter than {self._size} bytes while it was sent; push "
                "files that nothing writes to",
            )
        return [data]

    def close(self) -> None:
        os.close(self.fd)


def file_tensors(path: Path, shard: Shard) -> Iterator[SourceTensor]:
    for entry in shard.tensors:
        begin = shard.entry.data_start + entry.begin
        yield SourceTensor(
            entry.name,
            entry.dtype,
            entry.shape,
            partial(_open_range, path, shard.entry.size, begin),
        )


def _open_range(path: Path, size: int, start: int, _: Scratch) -> Read:
    reader = _FileReader(path, size)

    def read(begin: int, end: int) -> bytes:
        # One call gives at most 2 GiB.
        steps = range(start + begin, start + end, 1 << 30)
        return b"".join(
            part for at in steps for part in reader.read(at, min(at + (1 << 30), start + end))
        )

    # Nobody closes a tensor.
    weakref.finalize(read, reader.close)
    return read


class _BlobReader:
    def __init__(self, blob: memoryview) -> None:
        self._blob = blob

    def read(self, begin: int, end: int) -> list[Part]:
        return [self._blob[begin:end]]

    def close(self) -> None:
        self._blob = memoryview(b"")


def blob_shard(blob: memoryview, index: int, name: str) -> Shard:
    """Return the shard that bytes in memory are; they stay in use as long as it is."""
    header_size = int.from_bytes(blob[:8], "little")
    entry = ShardEntry(name, len(blob), header_size)
    with typed_errors():
        tensors = check_shard(entry, parse_header(blob[8 : 8 + header_size], index))
    return Shard(index, entry, tensors, lambda _: _BlobReader(blob))


def file_header(path: Path, size: int) -> bytes:
    """Return the header of a safetensors file of so many bytes, which may be wrong."""
    reader = _FileReader(path, size)
    try:
        with typed_errors():
            return read_header(str(path), reader.fd, size)
    finally:
        reader.close()


def file_shard(path: Path, index: int) -> Shard:
    ((_, shard),), _ = open_shards(path)
    return replace(shard, index=index)


def open_shards(
    checkpoint: Path,
) -> tuple[list[tuple[Path, Shard]], Callable[[], Sequence[Sequence[TensorEntry]]]]:
    """Return the shards of a checkpoint's files, and a call for what is taken of each.

    The call refuses tensors that two files hold and no index settles. For `checkpoint` see
    `weightsync.model.checkpoint_folder`.
    """
    try:
        whole = stat.S_ISDIR(checkpoint.stat().st_mode)
    except OSError as error:
        raise _unreadable(checkpoint, error) from None
    folder, names = (checkpoint, None) if whole else (checkpoint.parent, [checkpoint.name])
    with _naming(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = open_checkpoint(fd, names=names, keep_open=False)
        finally:
            os.close(fd)
    files = []
    for at, file in enumerate(found.files):
        path = folder / file.name
        opens = partial(_file_reader, path, file.size)
        files.append((path, Shard(at, file.entry, file.tensors, opens)))
    return files, partial(_chosen, folder, found)


def _file_reader(path: Path, size: int, _: Scratch) -> _FileReader:
    return _FileReader(path, size)


def _chosen(folder: Path, found: CheckpointFolder) -> Sequence[Sequence[TensorEntry]]:
    with _naming(folder):
        return found.chosen()


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(folder, error) from None
    except WeightSyncError as error:
        raise refuse(error.reason, f"{folder}: {error.message}") from None


class TensorReader:
    """Reads a header and the tensors packed behind it; those on a device come through `scratch`."""

    # Reads go forward, so only the tensor read last is kept open: a copy that a strided tensor
    # needs lives no longer than that tensor's turn.
    def __init__(self, header: bytes, tensors: Sequence[SourceTensor], scratch: Scratch) -> None:
        self._header = header
        self._tensors = tensors
        self._scratch = scratch
        self._starts = [len(header)]
        for tensor in tensors:
            self._starts.append(self._starts[-1] + tensor.size)
        self._open: tuple[int, Read] | None = None

    def read(self, begin: int, end: int) -> list[Part]:
        parts: list[Part] = []
        if begin < len(self._header):
            parts.append(self._header[begin:end])
        index = max(0, bisect.bisect_right(self._starts, begin) - 1)
        while index < len(self._tensors) and self._starts[index] < end:
            start, stop = self._starts[index], self._starts[index + 1]
            if stop > max(start, begin):
                read = self._reader(index)
                parts.append(read(max(begin, start) - start, min(end, stop) - start))
            index += 1
        return parts

    def _reader(self, index: int) -> Read:
        if self._open is None or self._open[0] != index:
            self._open = None
            self._open = index, self._tensors[index].reader(self._scratch)
        return self._open[1]

    def close(self) -> None:
        self._open = None


@dataclass(frozen=True, slots=True)
class Frame(_Described):
    """A shard without bytes, the same for all tensors of these names and shapes."""

    header: bytes

    def filled(self, tensors: Sequence[SourceTensor]) -> Shard:
        """Return the shard of such tensors; their bytes are not touched yet."""
        header, sources = self.header, tuple(tensors)
        return Shard(
            self.index,
            self.entry,
            self.tensors,
            lambda scratch: TensorReader(header, sources, scratch),
        )


def frame_of(tensors: Sequence[SourceTensor], index: int, name: str) -> Frame:
    with typed_errors():
        json_header, entries = build_header(((t.name, t.dtype, t.shape) for t in tensors), index)
        header = len(json_header).to_bytes(8, "little") + json_header
        size = len(header) + sum(tensor.size for tensor in tensors)
        entry = ShardEntry(name, size, len(json_header))
        check_shard(entry, entries)
    return Frame(index, entry, entries, header)


def tensor_shard(tensors: Sequence[SourceTensor], index: int, name: str) -> Shard:
    return frame_of(tensors, index, name).filled(tensors)


def cut(tensors: Iterable[SourceTensor], shard_bytes: int) -> Iterator[list[SourceTensor]]:
    """Yield groups of at most `shard_bytes`, or of one larger tensor, holding one at a time."""
    group: list[SourceTensor] = []
    data = header = 0
    for tensor in tensors:
        entry = len(json.dumps(tensor.name)) + _ENTRY_BYTES + 20 * len(tensor.shape)
        if group and (data + tensor.size > shard_bytes or header + entry > MAX_HEADER_BYTES // 2):
            yield group
            group, data, header = [], 0, 0
        group.append(tensor)
        data += tensor.size
        header += entry
    if group:
        yield group


def pieces(shard: Shard, size: int, *, apart: bool) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a shard in order, none of more than `size` bytes.

    Those that end within a tensor end a multiple of `size` after its beginning. With `apart`, none
    reaches into two tensors.
    """
    begin, data = 0, shard.data_start
    ends = [data, *(data + tensor.end for tensor in shard.tensors), shard.entry.size]
    for start, end in itertools.pairwise([0, *ends]):
        if begin < start and (apart or end - begin > size):
            yield begin, start
            begin = start
        while end - begin > size:
            yield begin, begin + size
            begin += size
    if begin < shard.entry.size:
        yield begin, shard.entry.size


class _Outline(NamedTuple):
    shard_bytes: int
    #: Name, dtype and shape of every tensor.
    signature: list[tuple[str, str, tuple[int, ...]]]
    frames: list[Frame]
    layout: Layout

    def filled(self, tensors: Sequence[SourceTensor]) -> list[Shard]:
        shards, begin = [], 0
        for frame in self.frames:
            end = begin + len(frame.tensors)
            shards.append(frame.filled(tensors[begin:end]))
            begin = end
        return shards


class LayoutCache:
    """Knows how the tensors of the last call lay; threads may share it. It keeps no tensor."""

    def __init__(self) -> None:
        self._last: _Outline | None = None

    def shards_of(
        self, tensors: Sequence[SourceTensor], shard_bytes: int
    ) -> tuple[list[Shard], Layout]:
        """Return the shards that hold the tensors, in order, and the checked layout.

        A shard of several tensors has at most `shard_bytes`.
        """
        with typed_errors():
            check_count(len(tensors))
        signature = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        outline = self._last
        if outline is None or outline.shard_bytes != shard_bytes or outline.signature != signature:
            frames = _framed(tensors, shard_bytes)
            with typed_errors():
                layout = check_version([f.entry for f in frames], [f.tensors for f in frames])
            self._last = outline = _Outline(shard_bytes, signature, frames, layout)
        return outline.filled(tensors), outline.layout


def _framed(tensors: Sequence[SourceTensor], shard_bytes: int) -> list[Frame]:
    groups = list(cut(tensors, shard_bytes))
    names = ["model.safetensors"]
    if len(groups) != 1:
        names = [f"model-{at + 1:05}-of-{len(groups):05}.safetensors" for at in range(len(groups))]
    return [frame_of(group, at, names[at]) for at, group in enumerate(groups)]


def is_strided(placements: Sequence[Placement]) -> bool:
    """Whether elements do not lie in a row, as with FSDP2 over tensor parallel."""
    return any(hasattr(placement, "split_factor") for placement in placements)


def local_runs(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Yield the parts of a local tensor whose elements lie in a row along each dimension.

    Each is its slices in the local tensor, and the offsets of its first element in the full one,
    which has `shape`. `placements`, `sizes` and `coordinate` have one item per mesh dimension.
    """
    along = [
        _runs(dimension, size, placements, sizes, coordinate)
        for dimension, size in enumerate(shape)
    ]
    for runs in itertools.product(*along):
        yield tuple(where for where, _ in runs), tuple(first for _, first in runs)


def _runs(
    dimension: int,
    size: int,
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[tuple[slice, int]]:
    import torch

    indices = torch.arange(size).reshape([1] * dimension + [size])
    for placement, count, at in zip(placements, sizes, coordinate, strict=True):
        if getattr(placement, "dim", None) == dimension:
            # PyTorch's own rule of what a placement gives to whom; it has no public name.
            parts, _ = placement._split_tensor(  # type: ignore[attr-defined]  # noqa: SLF001
                indices, count, with_padding=False, contiguous=False
            )
            indices = parts[at]
    indices = indices.flatten()
    # Wherever the next element is not the next index, a run begins.
    breaks = (indices.diff() != 1).nonzero().reshape(-1).add(1).tolist()
    bounds = itertools.pairwise([0, *breaks, len(indices)])
    return [(slice(begin, end), int(indices[begin])) for begin, end in bounds if end > begin]
