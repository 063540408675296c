"""A register in a folder of this host: for the server that others ask, and processes beside it."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops import durable_files
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.ops.tasks import in_thread
from weightsync_server.register.folder_members import FolderMembers
from weightsync_server.register.key_changes import KeyChanges
from weightsync_server.register.membership import Membership
from weightsync_server.register.register import (
    Creation,
    MemberList,
    check_key,
    check_prefix,
    check_value,
    list_in_turn,
    not_creatable,
)
from weightsync_server.store.objects.object_keys import MARKER as STORE_MARKER

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Sequence

__all__ = ["FolderRegister"]

#: How often a watch looks, seconds.
_LOOK_S = 0.1
#: Separates the names of a key in a file's name; no key has it.
_SLASH = "+"


class FolderRegister:
    """Creates a key by linking a whole, flushed file; see `Register` for what is promised.

    Good for any number of processes of one host on a file system of that host. Not for several
    hosts, as over NFS, where a name may be read late and members of other hosts are not seen.

    Args:
        folder: Made when missing.

    Raises:
        WeightSyncError: REQUEST_INVALID; it cannot be written, or lies in a store of versions.
            NOT_SUPPORTED; its file system cannot link files that have no name yet.
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
        """Create a key, as in `Register`."""
        check_value(check_key(key), value)
        with translate_os_errors(f"creating {key} in {self.url}"):
            return await in_thread(self._create, key, value)

    async def create_among(
        self, key: str, value: bytes, prefix: str, known: Collection[str]
    ) -> Creation | None:
        """Create a key, as in `Register`: nobody takes a member's place meanwhile."""
        check_value(check_key(key), value)
        start = _name(check_prefix(prefix))
        names = {_name(one) for one in known}
        with translate_os_errors(f"creating {key} in {self.url}"):
            return await in_thread(self._create_among, key, value, start, names)

    async def members(self, prefix: str) -> MemberList:
        """Read who is there, as in `Register`."""
        start = _name(check_prefix(prefix))
        with translate_os_errors(f"reading {self.url}"):
            alive = await in_thread(self._members.alive, start)
            names = await in_thread(os.listdir, self._records)
        return MemberList(
            {_key(name): alive[name][1] for name in sorted(alive)},
            frozenset(_key(name) for name in names if name.startswith(start)),
        )

    async def get(self, key: str) -> bytes | None:
        """Read a key, as in `Register`."""
        check_key(key)
        with translate_os_errors(f"reading {key} in {self.url}"):
            return await in_thread(self._get, key)

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        """Read many keys, as in `Register`."""
        check_prefix(prefix)
        with translate_os_errors(f"reading {self.url}"):
            return await in_thread(self._list, prefix, start)

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        """Read many keys, as in `Register`."""
        return await list_in_turn(self, prefixes, start)

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, as in `Register`."""
        paths = [self._path(check_key(key)) for key in keys]
        with translate_os_errors(f"removing {len(keys)} keys of {self.url}"):
            await in_thread(self._delete, paths)

    async def watch(self, prefix: str) -> AsyncGenerator[frozenset[str], None]:
        """Look for changes ten times a second, as in `Register`."""
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
        """Put a member there, as in `Register`."""
        check_value(check_key(key), value)
        if self._path(key).exists():
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"{key} was created and is no member's; use another key"
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
        return {key: found[key] for key in sorted(found, key=_name) if key >= first}

    def _look(self, prefix: str) -> dict[str, int]:
        """Return the keys, each with its file's inode."""
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
                f"{store} is a store of versions, and what a register keeps would lie among them; "
                "give the register a folder of its own",
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
