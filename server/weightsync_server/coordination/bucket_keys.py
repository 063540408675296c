"""A register in a bucket of S3, Google Cloud Storage or Azure: an object is created once.

    <url>/weightsync-register.json   what lies here
    <url>/records/<key>              created once
    <url>/members/<key>/=<n>         put again and again by a member

An object store has no leases. Whoever looks counts a member by its own monotonic clock, from when
it saw the member's object change; one that it sees for the first time counts from the age that the
store's clock gives it. No wall clocks of hosts are compared. A member that takes another's name
gets the next number, and the highest living number counts, so that the one before never comes back
in its stead.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

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
from weightsync_server.store.objects.object_catalog import store_time
from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts
from weightsync_server.store.objects.object_store import claim, probe

_FOLDER = "members"
#: Stores date objects by whole seconds.
_RESOLUTION_S = 1.0
#: A member that has been gone for so long is removed by who looks; seconds.
_KEPT_S = 600.0


class _Name(NamedTuple):
    key: str
    number: int

    @property
    def path(self) -> str:
        return f"{_FOLDER}/{self.key}/={self.number}"


@dataclass
class _Sight:
    """What was last seen of one object; `mark` changes when its member puts it again.

    It did so at `since` or before, by this process's monotonic clock. The object counts for `ttl_s`
    from `since`.
    """

    mark: tuple[datetime, str]
    since: float
    ttl_s: int
    value: bytes


class BucketMembers:
    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self._sights: dict[_Name, _Sight] = {}

    async def read(self, key: str) -> bytes | None:
        return (await self.alive(key)).get(key, (0, None))[1]

    async def alive(self, above: str) -> dict[str, tuple[int, bytes]]:
        """Return number and value of each living member whose key is `above` or lies below it.

        `above` has no trailing slash; empty: all.
        """
        listed = await self._client.list_under(f"{_FOLDER}/{above}".rstrip("/"))
        names = {name: facts for path, facts in listed.items() if (name := _parse(path))}
        await self._see(names)
        found: dict[str, tuple[int, bytes]] = {}
        gone = []
        for name in sorted(names):
            sight = self._sights.get(name)
            left_s = sight.since + sight.ttl_s + _RESOLUTION_S - clock.monotonic() if sight else 0
            if sight and left_s > 0:
                found[name.key] = name.number, sight.value
            elif left_s < -_KEPT_S:
                gone.append(name)
        if gone:
            await self._client.delete([name.path for name in gone])
        for name in [name for name in self._sights if _is_under(name.key, above)]:
            if name not in names or name in gone:
                del self._sights[name]
        return found

    async def lease(self, key: str, value: bytes, ttl_s: int) -> BucketLease:
        """Return what puts a member there and renews it, in the place of who has the name."""
        listed = await self._client.list_under(f"{_FOLDER}/{key}")
        before = [name for path in listed if (name := _parse(path)) and name.key == key]
        number = max((name.number for name in before), default=0) + 1
        body = f"{ttl_s}\n".encode() + value
        while not (await self._client.create_or_read(_Name(key, number).path, body))[0]:
            number += 1
        return BucketLease(self._client, self, _Name(key, number), body, ttl_s)

    async def _see(self, names: dict[_Name, ObjectFacts]) -> None:
        marks = {name: (facts.modified, facts.tag) for name, facts in names.items()}
        unknown = [name for name in names if not self._knows_value(name, marks[name][1])]
        bodies = await self._client.get_all([name.path for name in unknown])
        seen = clock.monotonic()
        fresh = [name for name in names if name not in self._sights]
        now = await self._store_time() if fresh else None
        for name, mark in marks.items():
            body = bodies.get(name.path)
            sight = self._sights.get(name)
            if body is not None:
                ttl_s, _, value = body.partition(b"\n")
                age_s = 0.0
                if sight is None and now is not None:
                    age_s = max(0.0, (now - mark[0]).total_seconds())
                if sight is None or sight.mark != mark:
                    self._sights[name] = _Sight(mark, seen - age_s, int(ttl_s), value)
            elif sight is not None and sight.mark != mark:
                sight.mark, sight.since = mark, seen

    def _knows_value(self, name: _Name, tag: str) -> bool:
        sight = self._sights.get(name)
        return sight is not None and tag != "" and sight.mark[1] == tag

    async def _store_time(self) -> datetime:
        key = f"clocks/{secrets.token_hex(8)}"
        try:
            return await store_time(self._client, key)
        finally:
            await self._client.delete([key])


class BucketLease:
    def __init__(
        self, client: ObjectClient, members: BucketMembers, name: _Name, body: bytes, ttl_s: int
    ) -> None:
        self.key, self._ttl_s = name.key, ttl_s
        self._client, self._members, self._name, self._body = client, members, name, body
        self._writing = asyncio.Lock()

    async def renew(self) -> Renewal:
        """Put it again; who looks counts from when it sees that, so that a late one ends it."""
        async with self._writing:
            await self._client.put(self._name.path, self._body)
        # Nobody sees this member beside a living one that took its name later.
        number, _ = (await self._members.alive(self.key)).get(self.key, (0, b""))
        kept = number == self._name.number
        return Renewal(self._ttl_s if kept else 0, kept)

    async def release(self) -> None:
        async with self._writing:
            await self._client.delete([self._name.path])


def _parse(path: str) -> _Name | None:
    key, _, number = path.removeprefix(f"{_FOLDER}/").rpartition("/=")
    return _Name(key, int(number)) if key and number.isdecimal() else None


def _is_under(key: str, above: str) -> bool:
    return not above or key == above or key.startswith(f"{above}/")


_MARKER = "weightsync-register.json"
#: How often a watch looks, seconds.
_LOOK_S = 1.0


class BucketKeys:
    """Keeps keys as objects; see `CoordinationStore` for what is promised.

    The first call probes the bucket; every call is refused where the bucket would let two callers
    create one key. A watch lists the bucket once a second: use it for few members, where nothing
    else is at hand.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._client = ObjectClient(url)
        self.url = self._client.url
        self._timeout_s = timeout_s
        self._members = BucketMembers(self._client)
        self._opening = asyncio.Lock()
        self._is_open = False

    async def create(self, key: str, value: bytes) -> Creation:
        check_value(check_key(key), value)
        async with self._bounded(f"creating {key}"):
            if await self._members.read(key) is not None:
                raise not_creatable(key)
            return Creation(*await self._client.create_or_read(_path(key), value))

    async def create_among(
        self, key: str, value: bytes, prefix: str, known: Collection[str]
    ) -> Creation | None:
        """Create the key right after it was looked who is there."""
        above = check_prefix(prefix).rstrip("/")
        async with self._bounded(f"listing {prefix}"):
            alive = await self._members.alive(above)
        if alive.keys() <= set(known):
            return await self.create(key, value)
        found = await self.get(key)
        return Creation(created=False, value=found) if found is not None else None

    async def members(self, prefix: str) -> MemberList:
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
        check_key(key)
        async with self._bounded(f"reading {key}"):
            found = await self._client.get(_path(key))
            return found if found is not None else await self._members.read(key)

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        above = check_prefix(prefix).rstrip("/")
        async with self._bounded(f"listing {prefix or 'all keys'}"):
            listed = await self._client.list_under(_path(above).rstrip("/"))
            bodies = await self._client.get_all([one for one in listed if one >= _path(start)])
            found = {path[len(_path("")) :]: body for path, body in bodies.items()}
            found |= {key: value for key, (_, value) in (await self._members.alive(above)).items()}
        return {key: found[key] for key in sorted(found) if key.startswith(prefix) and key >= start}

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        return await list_in_turn(self, prefixes, start)

    async def delete(self, keys: Sequence[str]) -> None:
        async with self._bounded(f"removing {len(keys)} keys"):
            await self._client.delete([_path(check_key(key)) for key in keys])

    async def watch(self, prefix: str) -> AsyncGenerator[frozenset[str], None]:
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
        check_value(check_key(key), value)
        async with self._bounded(f"putting {key}"):
            if await self._client.head(_path(key)) is not None:
                raise WeightSyncError(
                    Reason.REQUEST_INVALID,
                    f"{key} was created and does not belong to a member; use another key",
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
                f"{what} was not answered by {self.url} within {self._timeout_s:g} s, so it may "
                "or may not have been done; check that the store is reachable, then call again",
            ) from None

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await claim(self._client, "register", _MARKER)
                await probe(self._client)
                self._is_open = True


def _path(key: str) -> str:
    return f"records/{key}"
