"""A checkpoint folder of a trainer, opened without following any link."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Never

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.residency.checkpoint_layout import read_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightsync.model.manifest import Layout
    from weightsync.shm.segment_socket import OfferedFile

__all__ = ["Files", "WeightFolder", "changed", "open_folder"]

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES, _MAX_PATH = 64 << 20, 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Without O_NONBLOCK a FIFO put in the place of a file would block until somebody writes.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
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
        files: Name, size in bytes and descriptor of each, sorted by name.
        layout: Which tensors they hold; the files are its shards, in this order.
        stamps: How long each was and when it was written, as it was opened.
        close: Closes every file.
    """

    path: str
    files: Sequence[OfferedFile]
    layout: Layout
    stamps: Sequence[tuple[int, int]]
    close: Callable[[], None]

    @property
    def facts(self) -> Files:
        """Name of each file, how long it was and when it was written, as it was opened."""
        return tuple(
            (name, *stamp) for (name, *_), stamp in zip(self.files, self.stamps, strict=True)
        )

    def check_unchanged(self) -> None:
        """Refuse files that somebody wrote since they were opened.

        Raises:
            WeightSyncError: SHARD_INVALID, naming one.
        """
        for (name, _, fd), stamp in zip(self.files, self.stamps, strict=True):
            if _stamp(fd) != stamp:
                raise changed(name)


def changed(name: str) -> WeightSyncError:
    """Return the refusal of a file that was written while it was read."""
    return WeightSyncError(
        Reason.SHARD_INVALID,
        f"{_shown(name)} changed while it was read; post the folder when it is whole",
    )


def open_folder(roots: Sequence[Path], path: str) -> WeightFolder:
    """Return the checkpoint at a path, which is looked up from one of the roots, link by no link.

    Where the folder has an index, the files that it names are the checkpoint, else all of them.

    Args:
        roots: Folders below which it must lie; absolute. Their own paths may hold links.
        path: Of the folder, absolute. The caller closes what is returned.

    Raises:
        WeightSyncError: REQUEST_INVALID, SHARD_INVALID or LAYOUT_INVALID: it is elsewhere, no
            folder, or holds no whole checkpoint.
        OSError: The system fails.
    """
    root, parts = _below(roots, path)
    with contextlib.ExitStack() as folders, contextlib.ExitStack() as opened:
        folder = _descend(root, parts, path)
        folders.callback(os.close, folder)
        index = _index(folder)
        files = []
        for name in sorted(set(index.values())) or _listed(folder, path):
            fd = _regular(name, folder)
            opened.callback(os.close, fd)
            files.append((name, os.fstat(fd).st_size, fd))
        stamps = [_stamp(fd) for _, _, fd in files]
        layout = read_layout(files)
        _check_index(index, files, layout)
        return WeightFolder(path, files, layout, stamps, opened.pop_all().close)


def _below(roots: Sequence[Path], path: str) -> tuple[Path, tuple[str, ...]]:
    if not roots:
        raise _refused("this server imports no folders; start it with --import-dir DIR")
    named = PurePosixPath(path)
    plain = _is_text(path) and len(path) <= _MAX_PATH and "\0" not in path
    if not plain or not named.is_absolute() or ".." in named.parts:
        raise _refused(f"weight_dir {_shown(path)} must be an absolute path without '..'")
    for root in roots:
        if root in Path(named).parents:
            return root, named.relative_to(root).parts
    below = " or ".join(str(root) for root in roots)
    raise _refused(
        f"weight_dir {_shown(path)} does not lie below {below}; write checkpoints there, or start "
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
        _not_opened(f"{_shown(name)} of weight_dir {_shown(path)}", "folder", error)


def _regular(name: str, folder: int) -> int:
    """Return a regular file, open; no device is opened and no link followed."""
    if not _is_text(name):
        raise _refused(f"file name {_shown(name)} is not UTF-8; rename the file")
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _no_file(name)
        fd = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        _not_opened(_shown(name), "file", error)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_file(name)
    return fd


def _listed(folder: int, path: str) -> list[str]:
    names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if not names:
        raise _refused(
            f"there is no .safetensors file in weight_dir {_shown(path)}; post the folder that "
            "holds them, when they are written"
        )
    return names


def _index(folder: int) -> Mapping[str, str]:
    """Return which file holds which tensor, as the folder's index says; empty: it has none."""
    if _INDEX not in os.listdir(folder):
        return {}
    fd = _regular(_INDEX, folder)
    with os.fdopen(fd, "rb") as file:
        text = file.read(_MAX_INDEX_BYTES + 1)
    try:
        found: dict[str, str] = json.loads(text)["weight_map"]
        inside = all(_is_name(name) for name in found.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        inside = False
    if not inside or len(text) > _MAX_INDEX_BYTES or not found:
        raise _refused(f"{_INDEX} is no index of safetensors files; write it anew or remove it")
    return found


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _check_index(index: Mapping[str, str], files: Sequence[OfferedFile], layout: Layout) -> None:
    places = {tensor.name: files[tensor.shard][0] for tensor in layout.tensors}
    for tensor, file in index.items():
        if places.get(tensor) != file:
            raise WeightSyncError(
                Reason.LAYOUT_INVALID,
                f"{_INDEX} says that {_shown(file)} holds {_shown(tensor)}, which it does not; "
                "post the folder when all of it is written",
            )


def _stamp(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def _not_opened(what: str, kind: str, error: OSError) -> Never:
    if error.errno not in _WRONG:
        raise error
    if error.errno == errno.ENOENT:
        raise _refused(f"{what} does not exist here; write it before you post the folder")
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        raise _refused(f"{what} is a link or no {kind}; no link is followed")
    raise _refused(f"{what} cannot be opened: {error.strerror}; let the server's user read it")


def _no_file(name: str) -> WeightSyncError:
    return _refused(f"{_shown(name)} is a link or no regular file; no link is followed")


def _refused(sentence: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, sentence)


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 200 else text[:197] + "...")
