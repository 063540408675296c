"""A register in a bucket of S3, Google Cloud Storage or Azure: an object is created once.

<url>/weightsync-register.json   what lies here
<url>/records/<key>              created once
<url>/members/<key>/=<n>         put again and again by a member
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.register.bucket_members import BucketMembers
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
from weightsync_server.store.objects.object_client import ObjectClient
from weightsync_server.store.objects.store_probe import claim, probe

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence

__all__ = ["BucketRegister"]

_MARKER = "weightsync-register.json"
#: How often a watch looks, seconds.
_LOOK_S = 1.0


class BucketRegister:
    """Keeps keys as objects; see `Register` for what is promised.

    The first call probes the bucket, and every one is refused where it would let two create a key.
    A watch lists the bucket once a second: for few members, and where nothing else is at hand.

    Args:
        url: `s3://bucket/prefix`, `gs://...` or `az://...`: a place of its own.
        timeout_s: The longest time of a call, in seconds.

    Raises:
        WeightSyncError: NOT_SUPPORTED; the URL names no such place.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._client = ObjectClient(url)
        self.url = self._client.url
        self._timeout_s = timeout_s
        self._members = BucketMembers(self._client)
        self._opening = asyncio.Lock()
        self._is_open = False

    async def create(self, key: str, value: bytes) -> Creation:
        """Create a key, as in `Register`."""
        check_value(check_key(key), value)
        async with self._bounded(f"creating {key}"):
            if await self._members.read(key) is not None:
                raise not_creatable(key)
            return Creation(*await self._client.create_or_read(_path(key), value))

    async def create_among(
        self, key: str, value: bytes, prefix: str, known: Collection[str]
    ) -> Creation | None:
        """Create a key, as in `Register`: right after it was looked who is there."""
        above = check_prefix(prefix).rstrip("/")
        async with self._bounded(f"listing {prefix}"):
            alive = await self._members.alive(above)
        if alive.keys() <= set(known):
            return await self.create(key, value)
        found = await self.get(key)
        return Creation(created=False, value=found) if found is not None else None

    async def members(self, prefix: str) -> MemberList:
        """Read who is there, as in `Register`."""
        above = check_prefix(prefix).rstrip("/")
        async with self._bounded(f"listing {prefix or 'all keys'}"):
            alive = await self._members.alive(above)
            listed = await self._client.list_under(_path(above).rstrip("/"))
        permanent = (path[len(_path("")) :] for path in listed)
        return MemberList(
            {key: alive[key][1] for key in sorted(alive)},
            frozenset(key for key in permanent if key.startswith(prefix)),
        )

    async def get(self, key: str) -> bytes | None:
        """Read a key, as in `Register`."""
        check_key(key)
        async with self._bounded(f"reading {key}"):
            found = await self._client.get(_path(key))
            return found if found is not None else await self._members.read(key)

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        """Read many keys, as in `Register`."""
        above = check_prefix(prefix).rstrip("/")
        async with self._bounded(f"listing {prefix or 'all keys'}"):
            listed = await self._client.list_under(_path(above).rstrip("/"))
            bodies = await self._client.get_all([one for one in listed if one >= _path(start)])
            found = {path[len(_path("")) :]: body for path, body in bodies.items()}
            found |= {key: value for key, (_, value) in (await self._members.alive(above)).items()}
        return {key: found[key] for key in sorted(found) if key.startswith(prefix) and key >= start}

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        """Read many keys, as in `Register`."""
        return await list_in_turn(self, prefixes, start)

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, as in `Register`."""
        async with self._bounded(f"removing {len(keys)} keys"):
            await self._client.delete([_path(check_key(key)) for key in keys])

    async def watch(self, prefix: str) -> AsyncGenerator[frozenset[str], None]:
        """List once a second, as in `Register`."""
        check_prefix(prefix)
        changes = KeyChanges()
        while True:
            try:
                async with self._bounded(f"watching {prefix or 'all keys'}"):
                    now = await self._look(prefix)
            except WeightSyncError as error:
                if error.reason not in (Reason.FAULT, Reason.DEADLINE_EXCEEDED):
                    raise
                changes.lost()
            else:
                changed = changes.see(now)
                if changed is not None:
                    yield changed
            await asyncio.sleep(_LOOK_S)

    async def member(self, key: str, value: bytes, ttl_s: int) -> Membership:
        """Put a member there, as in `Register`."""
        check_value(check_key(key), value)
        async with self._bounded(f"putting {key}"):
            if await self._client.head(_path(key)) is not None:
                raise WeightSyncError(
                    Reason.REQUEST_INVALID, f"{key} was created and is no member's; use another key"
                )
            lease = await self._members.lease(key, value, ttl_s)
        return await Membership(lease, ttl_s).start()

    async def close(self) -> None:
        """Nothing is open."""

    async def _look(self, prefix: str) -> dict[str, object]:
        """Return the keys, each with what changes when its holder does."""
        above = prefix.rstrip("/")
        listed = await self._client.list_under(_path(above).rstrip("/"))
        found: dict[str, object] = {path[len(_path("")) :]: facts for path, facts in listed.items()}
        found |= {key: number for key, (number, _) in (await self._members.alive(above)).items()}
        return {key: mark for key, mark in found.items() if key.startswith(prefix)}

    @contextlib.asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        """Give up after the time; the store may do what was asked at any time after."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._open()
                yield
        except TimeoutError:
            raise WeightSyncError(
                Reason.DEADLINE_EXCEEDED,
                f"{what} was not answered by {self.url} within {self._timeout_s:g} s, so that it "
                "may be done or not; see that the store can be reached, then call again",
            ) from None

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await claim(self._client, "register", _MARKER)
                await probe(self._client)
                self._is_open = True


def _path(key: str) -> str:
    return f"records/{key}"
