"""A checkpoint folder, read in one way by all: its index decides which file a tensor comes from.

A folder without an index is all of its files, and then none may hold what another holds. What is
no whole checkpoint is refused by file as REQUEST_INVALID, SHARD_INVALID or LAYOUT_INVALID.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Never

from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.model.layout import (
    MAX_HEADER_BYTES,
    build_header,
    check_count,
    check_shard,
    check_version,
    parse_header,
)
from weightsync.model.manifest import Layout, ShardEntry, TensorEntry
from weightsync.process_limits import available_bytes, memory_remedy

logger = logging.getLogger(__name__)


#: Bytes that the kernel copies in one call.
_PIECE = 1 << 30


def in_memory(header: bytes, fd: int, ranges: Sequence[tuple[int, int]], what: str) -> int:
    """Return a descriptor of a safetensors file in memory, which the caller closes.

    The length of `header` is a multiple of 8 bytes. `ranges` has begin and end of the data in `fd`,
    in their order; `what` names the file in the error, MEMORY_EXHAUSTED.
    """
    size = sum(end - begin for begin, end in ranges)
    if size > (free := available_bytes()):
        raise WeightSyncError(
            Reason.MEMORY_EXHAUSTED,
            f"{what} takes {size} bytes of memory while it is read, and {free} are there; free as "
            "much",
        )
    with contextlib.ExitStack() as undo:
        try:
            copy = os.memfd_create("weightsync-checkpoint")
            undo.callback(os.close, copy)
            os.write(copy, len(header).to_bytes(8, "little") + header)
            for begin, end in ranges:
                _append(copy, fd, begin, end)
        except OSError as error:
            remedy = memory_remedy(error, "it needs as much memory as its files")
            raise WeightSyncError(
                Reason.MEMORY_EXHAUSTED, f"{what} cannot be read: {error}; {remedy}"
            ) from error
        undo.pop_all()
    return copy


def _append(copy: int, fd: int, begin: int, end: int) -> None:
    while begin < end:
        count = os.sendfile(copy, fd, begin, min(_PIECE, end - begin))
        if not count:
            raise OSError(errno.EIO, "it became shorter")
        begin += count


INDEX = "model.safetensors.index.json"
#: Of an index: 128 bytes for each of two million tensors.
MAX_INDEX_BYTES = 256 << 20
#: Without O_NONBLOCK a FIFO put in the place of a file would block until somebody writes.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
#: What the caller named wrongly; the rest is the system's.
_WRONG = frozenset(
    {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
)
_WHOLE = "give the folder once it is completely written"


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One safetensors file, open, its header checked.

    `fd` is -1 once it was closed; `tensors` are in the order of their bytes. `stamp` has the length
    and the time of the last write, in nanoseconds, from before it was read.
    """

    name: str
    size: int
    fd: int
    entry: ShardEntry
    tensors: tuple[TensorEntry, ...]
    stamp: tuple[int, int]

    @property
    def unchanged(self) -> bool:
        return _stamp(self.fd) == self.stamp


@dataclass(frozen=True)
class CheckpointFolder:
    """The files of one checkpoint, open until `close`, sorted by name; `index` may be empty."""

    files: tuple[CheckpointFile, ...]
    index: Mapping[str, str]
    close: Callable[[], None] = lambda: None
    index_name: str = INDEX

    @cached_property
    def holders(self) -> Mapping[str, tuple[str, ...]]:
        """Which files hold each tensor, whatever the index says; more than one: it has copies."""
        found: dict[str, tuple[str, ...]] = {}
        for file in self.files:
            for tensor in file.tensors:
                found[tensor.name] = (*found.get(tensor.name, ()), file.name)
        return found

    def wrong_entries(self) -> Iterator[str]:
        """Yield what the index says of a file that the file does not hold, with both files."""
        for tensor, file in self.index.items():
            holders = self.holders.get(tensor, ())
            if file not in holders:
                found = f"but it is {_listed(holders)}" if holders else "which does not hold it"
                yield f"{self.index_name} places {shown(tensor)} in {shown(file)}, {found}"

    def check_index(self) -> None:
        for wrong in self.wrong_entries():
            raise WeightSyncError(Reason.LAYOUT_INVALID, f"{_WHOLE}: {wrong}")

    def chosen(self) -> tuple[tuple[TensorEntry, ...], ...]:
        """Return what is taken from each file: each tensor once, from where the index says.

        Without an index, a tensor in two files is refused.
        """
        copies = {name: files for name, files in self.holders.items() if len(files) > 1}
        if not copies:
            return tuple(file.tensors for file in self.files)
        for name, holders in copies.items():
            if self.index.get(name) not in holders:
                raise _twice(name, holders, self.index_name)
        name, holders = next(iter(copies.items()))
        logger.warning(
            "two files hold each of %d tensors; the first, %s, %s, is taken from %s, as %s says",
            len(copies),
            shown(name),
            _listed(holders),
            shown(self.index[name]),
            self.index_name,
        )
        return tuple(
            tuple(t for t in file.tensors if self.index.get(t.name, file.name) == file.name)
            if any(t.name in copies for t in file.tensors)
            else file.tensors
            for file in self.files
        )


def open_checkpoint(
    folder: int, *, names: Sequence[str] | None = None, links: bool = True, keep_open: bool = True
) -> CheckpointFolder:
    """Return the checkpoint in an open folder; the caller closes it.

    `names` of None are those of the folder's index, or all `.safetensors` files. With `links` files
    may be links, as in the cache of a hub; else none is followed. Without `keep_open` each file is
    closed when its header was read, to need fewer descriptors.
    """
    index = read_index(folder, links=links) if names is None else {}
    chosen = sorted(set(names or index.values())) or _all_files(folder)
    with contextlib.ExitStack() as opened:
        files: list[CheckpointFile] = []
        # Of a distributed checkpoint each file has its part of a tensor.
        tensors: set[str] = set()
        for at, name in enumerate(chosen):
            with contextlib.ExitStack() as reading:
                fd = _opened(name, folder, index, links=links)
                (opened if keep_open else reading).callback(os.close, fd)
                file = read_file(name, fd, at)
            files.append(file if keep_open else replace(file, fd=-1))
            tensors.update(tensor.name for tensor in files[-1].tensors)
            check_count(len(tensors))
        found = CheckpointFolder(tuple(files), index)
        found.check_index()
        return replace(found, close=opened.pop_all().close)


def read_index(folder: int, name: str = INDEX, *, links: bool = True) -> Mapping[str, str]:
    """Return which file holds which tensor, as a folder's index says; empty: it has none."""
    if name not in os.listdir(folder):
        return {}
    with os.fdopen(_opened(name, folder, {}, links=links), "rb") as file:
        text = file.read(MAX_INDEX_BYTES + 1)
    if len(text) > MAX_INDEX_BYTES:
        raise _no_index(name, f"it has more than {MAX_INDEX_BYTES} bytes")
    try:
        document = json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        what = error.args[0] if isinstance(error, _TwiceError) else "it is not JSON"
        raise _no_index(name, what) from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise _no_index(name, "it has no weight_map")
    for tensor, file in found.items():
        if not _is_file_name(file):
            where = shown(file) if isinstance(file, str) else "something else than a file"
            raise _no_index(
                name, f"it names {where} for {shown(tensor)}, which is not a file in its folder"
            )
    return found


def read_file(name: str, fd: int, at: int = 0, size: int | None = None) -> CheckpointFile:
    """Return shard `at` of an open file, its header checked; `fd` is neither moved nor closed."""
    stamp = _stamp(fd)
    size = stamp[0] if size is None else size
    header = read_header(name, fd, size)
    entry = ShardEntry(name[:255], size, len(header))
    declared = parse_header(header, at)
    whole = entry.data_start + max((tensor.end for tensor in declared), default=0)
    if size < whole:
        raise WeightSyncError(
            Reason.SHARD_INVALID,
            f"{shown(name)} has {size} bytes, its header declares {whole}: the file was cut "
            "short; copy it again",
        )
    return CheckpointFile(name, size, fd, entry, check_shard(entry, declared), stamp)


def read_header(name: str, fd: int, size: int) -> bytes:
    """Return the header of an open safetensors file, which may be wrong."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        header = os.pread(fd, length, 8)
        if len(header) == length:
            return header
    raise WeightSyncError(
        Reason.SHARD_INVALID,
        f"{shown(name)} is not a safetensors file, or was cut short: {size} bytes cannot hold a "
        f"header of {length}; copy it again",
    )


def read_layout(files: Sequence[tuple[str, int, int]]) -> Layout:
    """Return the layout of a version of which each file is a shard.

    `files` has the name, size in bytes and descriptor of each, which is neither moved nor closed.
    """
    read: list[CheckpointFile] = []
    count = 0
    for at, (name, size, fd) in enumerate(files):
        read.append(read_file(name, fd, at, size))
        count += len(read[-1].tensors)
        check_count(count)
    groups = CheckpointFolder(tuple(read), {}).chosen()
    return check_version([file.entry for file in read], groups)


def packed(file: CheckpointFile, tensors: Sequence[TensorEntry], what: str) -> int:
    """Return a descriptor of a file in memory with only some tensors of another.

    `tensors` are in the order of their bytes; `what` names the file in errors.
    """
    header, _ = build_header((t.name, t.dtype, t.shape) for t in tensors)
    start = file.entry.data_start
    return in_memory(header, file.fd, [(start + t.begin, start + t.end) for t in tensors], what)


def shown(text: str) -> str:
    """Return a name of a file or tensor for a sentence, however long or strange it is."""
    return json.dumps(text if len(text) <= 200 else text[:197] + "...")


class _TwiceError(ValueError):
    """A key that an index has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(f"it lists {shown(key)} twice")
        found[key] = value
    return found


def _opened(name: str, folder: int, index: Mapping[str, str], *, links: bool) -> int:
    """Return a regular file of a folder, open; no device is opened."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise invalid_request(f"file name {shown(name)} is not UTF-8; rename the file") from None
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=links).st_mode):
            raise _no_file(name, links=links)
        fd = os.open(name, _FILE if links else _FILE | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        _not_opened(name, index, error)
    # It may have been exchanged since.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_file(name, links=links)
    return fd


def _not_opened(name: str, index: Mapping[str, str], error: OSError) -> Never:
    if error.errno not in _WRONG:
        raise error
    tensor = next((tensor for tensor, file in index.items() if file == name), None)
    says = f", which {INDEX} names for {shown(tensor)}" if tensor is not None else ""
    if error.errno == errno.ENOENT:
        raise invalid_request(f"{shown(name)} does not exist here{says}; {_WHOLE}") from None
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        raise _no_file(name, links=False) from None
    raise invalid_request(
        f"{shown(name)} cannot be opened: {error.strerror}{says}; let this process read it"
    ) from None


def _no_file(name: str, *, links: bool) -> WeightSyncError:
    if links:
        return invalid_request(f"{shown(name)} is not a regular file; {_WHOLE}")
    return invalid_request(
        f"{shown(name)} is a link or not a regular file; give a regular file: links are not "
        "followed"
    )


def _all_files(folder: int) -> list[str]:
    found = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if not found:
        raise invalid_request(
            "give the folder that holds the .safetensors files, once they are written: there is "
            "none in this one"
        )
    return found


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _no_index(name: str, why: str) -> WeightSyncError:
    return invalid_request(
        f"{name} is not an index of safetensors files: {why}; write it again or remove it"
    )


def _twice(name: str, holders: Sequence[str], index: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.LAYOUT_INVALID,
        f"tensor {shown(name)} is in the version twice, {_listed(holders)}; remove the file that "
        f"does not belong there, or have {index} say which one counts",
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"in {shown(name)}" for name in names[:2])


def _stamp(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns
