"""A checkpoint folder of a trainer, opened without following any link."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Never

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.checkpoint_folder import open_checkpoint, packed, read_layout, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from weightsync.model.checkpoint_folder import CheckpointFolder
    from weightsync.model.manifest import Layout
    from weightsync.shm.segment_socket import OfferedFile

__all__ = ["Files", "WeightFolder", "changed", "facts_of", "folder_facts", "open_folder"]

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

    Attributes:
        path: As the caller named it.
        files: Name, size in bytes and descriptor of what is taken of each, sorted by name.
        layout: Which tensors they hold; the files are its shards, in this order.
        read: The folder's files themselves, open.
        close: Closes every file.
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

    What it holds is read as `weightsync.model.checkpoint_folder` says.

    Args:
        roots: Folders below which it must lie; absolute. Their own paths may hold links.
        path: Of the folder, absolute. The caller closes what is returned.

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
        raise _refused("this server imports no folders; start it with --import-dir DIR")
    named = PurePosixPath(path)
    plain = _is_text(path) and len(path) <= _MAX_PATH and "\0" not in path
    if not plain or not named.is_absolute() or ".." in named.parts:
        raise _refused(f"weight_dir {shown(path)} must be an absolute path without '..'")
    for root in roots:
        if root in Path(named).parents:
            return root, named.relative_to(root).parts
    below = " or ".join(str(root) for root in roots)
    raise _refused(
        f"weight_dir {shown(path)} does not lie below {below}; write checkpoints there, or start "
        "the server with --import-dir naming a folder above them"
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
        raise _refused(f"{what} does not exist here; write it before you post the folder")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        raise _refused(f"{what} is a link or no folder; no link is followed")
    raise _refused(f"{what} cannot be opened: {error.strerror}; let the server's user read it")


def _refused(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)
