"""A checkpoint folder of a trainer, opened without following any link, and what is sent of it.

That is its files, or, for those with other dtypes than the engine has, their tensors cast.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Never

import numpy as np

from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.model.checkpoint_folder import (
    CheckpointFolder,
    open_checkpoint,
    packed,
    read_layout,
    shown,
)
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.float_casts import CastRangeError, cast_elements, casts
from weightsync.model.layout import build_header, check_shard, check_version
from weightsync.model.manifest import Layout, ShardEntry, TensorEntry
from weightsync.shm.segment_socket import OfferedFile
from weightsync_server.ops.tasks import in_thread

_MAX_PATH = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: What the caller named wrongly; the rest is the system's.
_WRONG = frozenset(
    {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
)


#: Name, size in bytes and time of the last change in nanoseconds, of each file.
Files = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class WeightFolder:
    """The safetensors files of one checkpoint, open until `close`.

    `path` is as the caller named it. `files` has name, size in bytes and descriptor of what is
    taken of each, sorted by name; they are the shards of `layout`, in this order. `read` has the
    folder's files themselves, open.
    """

    path: str
    files: Sequence[OfferedFile]
    layout: Layout
    read: CheckpointFolder
    close: Callable[[], None]

    def check_unchanged(self) -> None:
        """Refuse files that somebody wrote since they were opened.

        Raises:
            WeightSyncError: SHARD_INVALID, naming one.
        """
        for file in self.read.files:
            if not file.unchanged:
                raise changed(file.name)


def changed(name: str) -> WeightSyncError:
    """Return the refusal of a file that was written while it was read."""
    return WeightSyncError(
        Reason.SHARD_INVALID,
        f"{shown(name)} changed while it was read; post the folder when it is whole",
    )


def open_folder(roots: Sequence[Path], path: str) -> WeightFolder:
    """Return the checkpoint at a path, which is looked up from one of the roots, link by no link.

    What it holds is read as `weightsync.model.checkpoint_folder` says. The folder, an absolute
    path, must lie below one of `roots`, which are absolute; their own paths may hold links. The
    caller closes what is returned.

    Raises:
        WeightSyncError: REQUEST_INVALID, SHARD_INVALID or LAYOUT_INVALID: it is elsewhere, no
            folder, or holds no whole checkpoint. MEMORY_EXHAUSTED: no room to take a copy of a
            tensor out of a file.
        OSError: The system fails.
    """
    with contextlib.ExitStack() as opened:
        read = _read(roots, path)
        opened.callback(read.close)
        files = list(_taken(read, opened))
        return WeightFolder(path, files, read_layout(files), read, opened.pop_all().close)


def folder_facts(roots: Sequence[Path], path: str) -> Files:
    """Return which files the checkpoint at a path is made of; see `open_folder`."""
    read = _read(roots, path)
    read.close()
    return facts_of(read)


def facts_of(read: CheckpointFolder) -> Files:
    """Return which files a checkpoint is made of."""
    return tuple((file.name, *file.stamp) for file in read.files)


def _read(roots: Sequence[Path], path: str) -> CheckpointFolder:
    root, parts = _below(roots, path)
    folder = _descend(root, parts, path)
    try:
        return open_checkpoint(folder, links=False)
    finally:
        os.close(folder)


def _taken(read: CheckpointFolder, opened: contextlib.ExitStack) -> Iterator[OfferedFile]:
    """Yield the files as they are pushed: without the copies that the index does not choose."""
    for file, tensors in zip(read.files, read.chosen(), strict=True):
        fd, size = file.fd, file.size
        if tensors != file.tensors:
            fd = packed(file, tensors, shown(file.name))
            opened.callback(os.close, fd)
            size = os.fstat(fd).st_size
        yield file.name, size, fd


def _below(roots: Sequence[Path], path: str) -> tuple[Path, tuple[str, ...]]:
    if not roots:
        raise invalid_request(
            "start this server with --import-dir DIR: without it, it imports no folders"
        )
    named = PurePosixPath(path)
    plain = _is_text(path) and len(path) <= _MAX_PATH and "\0" not in path
    if not plain or not named.is_absolute() or ".." in named.parts:
        raise invalid_request(f"weight_dir {shown(path)} must be an absolute path without '..'")
    for root in roots:
        if root in Path(named).parents:
            return root, named.relative_to(root).parts
    below = " or ".join(str(root) for root in roots)
    raise invalid_request(
        f"weight_dir {shown(path)} is not below {below}; write checkpoints there, or start the "
        "server with --import-dir naming a folder above them"
    )


def _descend(root: Path, parts: Sequence[str], path: str) -> int:
    """Return the folder, open; each part is looked up in the one before it."""
    # The path of a root is the operator's, who may have links in it.
    folder = _directory(str(root), None, path)
    for part in parts:
        try:
            deeper = _directory(part, folder, path)
        finally:
            os.close(folder)
        folder = deeper
    return folder


def _directory(name: str, parent: int | None, path: str) -> int:
    flags = _FOLDER if parent is None else _FOLDER | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=parent)
    except OSError as error:
        _not_opened(f"{shown(name)} of weight_dir {shown(path)}", error)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_opened(what: str, error: OSError) -> Never:
    if error.errno not in _WRONG:
        raise error
    if error.errno == errno.ENOENT:
        raise invalid_request(f"{what} does not exist; write it before you post the folder")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        raise invalid_request(
            f"{what} is a link or not a folder; give a folder: links are not followed"
        )
    raise invalid_request(
        f"{what} cannot be opened: {error.strerror}; let the server's user read it"
    )


#: Bytes that are read at once, off the event loop; a multiple of every dtype's.
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class CastFolder:
    """What is sent of a folder.

    Its files are open. `layout` is that of what is sent, and `cast` the number of tensors that are
    cast. `headers` has the bytes before the tensors', by index of the file, for each file of which
    a tensor is cast.
    """

    folder: WeightFolder
    layout: Layout
    cast: int
    headers: Mapping[int, bytes]

    @classmethod
    def of(cls, folder: WeightFolder, dtypes: Mapping[str, str]) -> CastFolder:
        """Return a folder, each tensor cast to the dtype of its name where that is a plain cast.

        `dtypes` are those of the engine's tensors, by name; it may lack some.

        Raises:
            WeightSyncError: LAYOUT_INVALID: the result can be no version.
        """
        given = folder.layout
        wanted = {
            tensor.name: dtypes[tensor.name]
            for tensor in given.tensors
            if casts(tensor.dtype, dtypes.get(tensor.name, ""))
        }
        headers: dict[int, bytes] = {}
        shards: list[ShardEntry] = []
        groups: list[Sequence[TensorEntry]] = []
        for index, (shard, group) in enumerate(zip(given.shards, given.by_shard, strict=True)):
            sent: Sequence[TensorEntry] = group
            if any(tensor.name in wanted for tensor in group):
                kinds = ((t.name, wanted.get(t.name, t.dtype), t.shape) for t in group)
                header, sent = build_header(kinds, index)
                headers[index] = len(header).to_bytes(8, "little") + header
                size = len(headers[index]) + max(tensor.end for tensor in sent)
                shard = ShardEntry(shard.name, size, len(header))  # noqa: PLW2901 - in its place
                sent = check_shard(shard, sent)
            shards.append(shard)
            groups.append(sent)
        layout = check_version(shards, groups) if headers else given
        return cls(folder, layout, len(wanted), headers)

    async def blocks(self, index: int) -> AsyncIterator[tuple[int, memoryview]]:
        """Yield the bytes of a file as they are sent, in order, with their offsets.

        Raises:
            WeightSyncError: SHARD_INVALID: it became shorter; REQUEST_INVALID, naming a tensor of
                which a value would become infinite.
        """
        file = self.folder.files[index]
        header = self.headers.get(index)
        if header is None:
            for begin, end in _ranges(0, file[1]):
                yield begin, memoryview(await in_thread(_read_range, file, begin, end))
            return
        yield 0, memoryview(header)
        given = {tensor.name: tensor for tensor in self.folder.layout.by_shard[index]}
        start = self.folder.layout.shards[index].data_start
        for tensor in self.layout.by_shard[index]:
            before, at = given[tensor.name], len(header) + tensor.begin
            for begin, end in _ranges(before.begin, before.end):
                data = await in_thread(_read_range, file, start + begin, start + end)
                if before.dtype != tensor.dtype:
                    data = await in_thread(_cast, data, before, tensor.dtype, begin)
                yield at, memoryview(data)
                at += len(data)


def _ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, _BLOCK_BYTES):
        yield at, min(at + _BLOCK_BYTES, end)


def _read_range(file: OfferedFile, begin: int, end: int) -> bytes:
    # Not mapped: a page of a file that got shorter would end the process.
    name, _, fd = file
    data = os.pread(fd, end - begin, begin)
    if len(data) != end - begin:
        raise changed(name)
    return data


def _cast(data: bytes, tensor: TensorEntry, wanted: str, begin: int) -> bytes:
    try:
        return cast_elements(np.frombuffer(data, np.uint8), tensor.dtype, wanted).tobytes()
    except CastRangeError as error:
        at = (begin - tensor.begin) * 8 // DTYPE_BITS[tensor.dtype] + error.index
        raise invalid_request(
            f"write tensor {tensor.name[:100]!r} with values within the range of {wanted}, which "
            f"the engine has, or serve a checkpoint of {tensor.dtype}: element {at} is "
            f"{error.value:g}, which a cast would make infinite; post the folder then"
        ) from None
