"""A register in a folder of this host: for the server that others ask, and processes beside it.

The modification time of a file is the reading of the host's monotonic clock until which the member
counts: no change of the wall clock ends or revives anybody. The file names the boot that this clock
belongs to; what another boot left counts for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from pathlib import Path

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.coordination.coordination import (
    Creation,
    KeyChanges,
    MemberList,
    Membership,
    Renewal,
    check_key,
    check_prefix,
    check_value,
    list_in_turn,
    not_creatable,
)
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread
from weightsync_server.store.objects.object_keys import MARKER as STORE_MARKER

#: A file whose member has been gone for so long is removed; seconds.
_KEPT_S = 60.0
#: The longest wait for a turn, and between two looks for it; seconds.
_TURN_S, _ROSTER_LOOK_S = 2.0, 0.01
#: Begins the name of a file that has not got its own yet; no key begins so.
_HIDDEN = "."


class FolderMembers:
    """Reads members; blocks. `folder` holds members and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()

    def read(self, name: str) -> bytes | None:
        found = self._open(name)
        return found and found[1]

    def alive(self, start: str) -> dict[str, tuple[int, bytes]]:
        """Return inode and value of each living member, by the names that begin so."""
        found = {}
        for name in os.listdir(self.folder):  # noqa: PTH208 - names are what is wanted
            if name.startswith(start) and (member := self._open(name)):
                found[name] = member
        return found

    def lease(self, key: str, name: str, value: bytes, ttl_s: int) -> FolderLease:
        return FolderLease(self, key, name, self._boot + value, ttl_s)

    @contextlib.contextmanager
    def nobody_comes(self) -> Iterator[None]:
        """Let nobody appear until the block ends; blocks, and may raise DEADLINE_EXCEEDED."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            end = clock.monotonic() + _TURN_S
            while not _locked(fd):
                if clock.monotonic() >= end:
                    raise WeightSyncError(
                        Reason.DEADLINE_EXCEEDED,
                        f"another process has held the lock of {self.folder} for {_TURN_S:g} s; "
                        "if it is suspended, continue or end it (fuser names it)",
                    )
                threading.Event().wait(_ROSTER_LOOK_S)
            yield
        finally:
            os.close(fd)

    def _open(self, name: str) -> tuple[int, bytes] | None:
        try:
            with (self.folder / name).open("rb") as file:
                status, data = os.fstat(file.fileno()), file.read()
        except FileNotFoundError:
            return None
        ours = data.startswith(self._boot)
        left_s = status.st_mtime_ns / 1e9 - clock.monotonic()
        if ours and left_s > 0 and not name.startswith(_HIDDEN):
            return status.st_ino, data[len(self._boot) :]
        if not ours or left_s < -_KEPT_S:
            durable_files.unlink(self.folder / name)
        return None


class FolderLease:
    """One member's file, by a descriptor: what takes its name is never renewed in its stead."""

    def __init__(
        self, members: FolderMembers, key: str, name: str, data: bytes, ttl_s: int
    ) -> None:
        self.key = key
        self._members, self._name, self._data, self._ttl_s = members, name, data, ttl_s
        self._fd: int | None = None

    async def renew(self) -> Renewal:
        with translate_os_errors(f"renewing {self.key}"):
            kept = await in_thread(self._renew)
            # Nobody sees this member by a file that another one has put there.
            return Renewal(self._ttl_s if kept is not None else 0, bool(kept))

    async def release(self) -> None:
        with translate_os_errors(f"removing {self.key}"):
            await in_thread(self._release)

    def _renew(self) -> bool | None:
        """Return whether it was there as it was; None: another one is."""
        if self._fd is None:
            self._fd = self._place()
        elif (status := os.fstat(self._fd)).st_nlink:
            if status.st_mtime_ns / 1e9 <= clock.monotonic():
                # It was gone, and appears anew.
                with self._members.nobody_comes():
                    self._move_on(self._fd)
                return False
            self._move_on(self._fd)
            return status.st_mtime_ns / 1e9 > clock.monotonic()
        elif self._members.read(self._name) is None:
            # Swept away while this process was stopped.
            os.close(self._fd)
            self._fd = None
            self._fd = self._place()
        else:
            return None
        return False

    def _place(self) -> int:
        hidden = self._members.folder / f"{_HIDDEN}{secrets.token_hex(8)}"
        fd = durable_files.create_unnamed(self._members.folder)
        try:
            durable_files.write(fd, self._data)
            self._move_on(fd)
            # A link takes no name that is taken, and what has no name cannot be renamed.
            durable_files.link(fd, hidden)
            with self._members.nobody_comes():
                self._move_on(fd)
                durable_files.rename(hidden, self._members.folder / self._name)
        except BaseException:
            os.close(fd)
            durable_files.unlink(hidden)
            raise
        return fd

    def _move_on(self, fd: int) -> None:
        until = int((clock.monotonic() + self._ttl_s) * 1e9)
        os.utime(fd, ns=(until, until))

    def _release(self) -> None:
        if self._fd is None:
            return
        if os.fstat(self._fd).st_nlink:
            durable_files.unlink(self._members.folder / self._name)
        os.close(self._fd)
        self._fd = None


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


#: How often a watch looks, seconds.
_LOOK_S = 0.1
#: Separates the names of a key in a file's name; no key has it.
_SLASH = "+"


class FolderKeys:
    """Creates a key by linking a whole, flushed file; see `CoordinationStore` for what is promised.

    For processes of one host on a file system of that host: over NFS a name may be read late, and
    members of other hosts are not seen. `folder` is made when missing.

    Raises:
        WeightSyncError: REQUEST_INVALID if it cannot be written, or lies in a store of versions;
            NOT_SUPPORTED if its file system cannot link files that have no name yet.
    """

    def __init__(self, folder: Path) -> None:
        self.url = folder.as_uri()
        _check_apart(folder)
        self._records = folder / "records"
        self._members = FolderMembers(folder / "members")
        try:
            above = [one for one in folder.parents if not one.exists()]
            for made in (self._records, self._members.folder):
                made.mkdir(parents=True, exist_ok=True)
            os.close(durable_files.create_unnamed(self._records))
            for made in (self._records, folder, *above):
                durable_files.flush_directory(made.parent)
        except OSError as error:
            raise _unusable(folder, error) from error

    async def create(self, key: str, value: bytes) -> Creation:
        check_value(check_key(key), value)
        with translate_os_errors(f"creating {key} in {self.url}"):
            return await in_thread(self._create, key, value)

    async def create_among(
        self, key: str, value: bytes, prefix: str, known: Collection[str]
    ) -> Creation | None:
        """Create the key while nobody can take a member's place."""
        check_value(check_key(key), value)
        start = _name(check_prefix(prefix))
        names = {_name(one) for one in known}
        with translate_os_errors(f"creating {key} in {self.url}"):
            return await in_thread(self._create_among, key, value, start, names)

    async def members(self, prefix: str) -> MemberList:
        start = _name(check_prefix(prefix))
        with translate_os_errors(f"reading {self.url}"):
            alive = await in_thread(self._members.alive, start)
            names = await in_thread(os.listdir, self._records)
        return MemberList(
            {_key(name): alive[name][1] for name in sorted(alive)},
            frozenset(_key(name) for name in names if name.startswith(start)),
        )

    async def get(self, key: str) -> bytes | None:
        check_key(key)
        with translate_os_errors(f"reading {key} in {self.url}"):
            return await in_thread(self._get, key)

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        check_prefix(prefix)
        with translate_os_errors(f"reading {self.url}"):
            return await in_thread(self._list, prefix, start)

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        return await list_in_turn(self, prefixes, start)

    async def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(check_key(key)) for key in keys]
        with translate_os_errors(f"removing {len(keys)} keys of {self.url}"):
            await in_thread(self._delete, paths)

    async def watch(self, prefix: str) -> AsyncGenerator[frozenset[str], None]:
        check_prefix(prefix)
        changes = KeyChanges()
        while True:
            with translate_os_errors(f"watching {self.url}"):
                now = await in_thread(self._look, prefix)
            changed = changes.see(now)
            if changed is not None:
                yield changed
            await asyncio.sleep(_LOOK_S)

    async def member(self, key: str, value: bytes, ttl_s: int) -> Membership:
        check_value(check_key(key), value)
        if self._path(key).exists():
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{key} was created and does not belong to a member; use another key",
            )
        return await Membership(self._members.lease(key, _name(key), value, ttl_s), ttl_s).start()

    async def close(self) -> None:
        """Nothing is open."""

    def _path(self, key: str) -> Path:
        return self._records / _name(key)

    def _create(self, key: str, value: bytes) -> Creation:
        if self._members.read(_name(key)) is not None:
            raise not_creatable(key)
        fd = durable_files.create_unnamed(self._records)
        try:
            durable_files.write(fd, value)
            durable_files.fsync(fd)
            durable_files.link(fd, self._path(key))
        except FileExistsError:
            return Creation(created=False, value=self._read(key))
        finally:
            os.close(fd)
        durable_files.flush_directory(self._records)
        return Creation(created=True, value=value)

    def _create_among(self, key: str, value: bytes, start: str, names: set[str]) -> Creation | None:
        with self._members.nobody_comes():
            if self._members.alive(start).keys() <= names:
                return self._create(key, value)
        found = self._get(key)
        return Creation(created=False, value=found) if found is not None else None

    def _read(self, key: str) -> bytes:
        data = self._path(key).read_bytes()
        # Its creator may have died before it did so: nobody may act on what could be lost.
        durable_files.flush_directory(self._records)
        return data

    def _get(self, key: str) -> bytes | None:
        try:
            return self._read(key)
        except FileNotFoundError:
            # A folder that is gone is an error, not a register without keys.
            durable_files.flush_directory(self._records)
            return self._members.read(_name(key))

    def _delete(self, paths: Sequence[Path]) -> None:
        for path in paths:
            durable_files.unlink(path)
        durable_files.flush_directory(self._records)

    def _list(self, prefix: str, first: str) -> dict[str, bytes]:
        start = prefix.replace("/", _SLASH)
        found = {
            _key(name): (self._records / name).read_bytes()
            for name in os.listdir(self._records)  # noqa: PTH208 - names are what is wanted
            if name.startswith(start) and _key(name) >= first
        }
        durable_files.flush_directory(self._records)
        found |= {_key(name): value for name, (_, value) in self._members.alive(start).items()}
        return {key: found[key] for key in sorted(found) if key >= first}

    def _look(self, prefix: str) -> dict[str, int]:
        start = prefix.replace("/", _SLASH)
        with os.scandir(self._records) as entries:
            found = {entry.name: entry.inode() for entry in entries if entry.name.startswith(start)}
        found |= {name: inode for name, (inode, _) in self._members.alive(start).items()}
        return {_key(name): inode for name, inode in found.items()}


def _name(key: str) -> str:
    return key.replace("/", _SLASH)


def _key(name: str) -> str:
    return name.replace(_SLASH, "/")


def _check_apart(folder: Path) -> None:
    for store in (folder, *folder.parents):
        if (store / STORE_MARKER).exists():
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{store} is a store of versions; give the register its own folder",
            )


def _unusable(folder: Path, error: OSError) -> WeightSyncError:
    # An older file system takes the request for one to open the directory itself.
    if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
        return WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"the file system of {folder} cannot create a register's keys whole; name a folder "
            "on a local disk",
        )
    return WeightSyncError(
        Reason.REQUEST_INVALID,
        f"the register's folder {folder} cannot be written ({error.strerror}); choose another or "
        "make it this user's",
    )
