"""Members in a bucket: objects that their processes put again, aged by those who look.

An object store has no leases. Whoever looks counts a member by its own monotonic clock, from when
it saw the member's object change; one that it sees for the first time counts from the age that the
store's clock gives it. No member's clock is asked, and wall clocks of hosts are not compared.

A member that takes another's name gets the next number, and the highest living number counts, so
that the one before, which goes on to put its own object, never comes back in its stead.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weightsync import clock
from weightsync_server.register.membership import Renewal
from weightsync_server.store.objects.object_collector import store_time

if TYPE_CHECKING:
    from datetime import datetime

    from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts

__all__ = ["BucketLease", "BucketMembers"]

_FOLDER = "members"
#: Stores date objects by whole seconds.
_RESOLUTION_S = 1.0
#: A member that has been gone for so long is removed by who looks; seconds.
_KEPT_S = 600.0


class _Name(NamedTuple):
    """One holder of a member's key."""

    key: str
    number: int

    @property
    def path(self) -> str:
        return f"{_FOLDER}/{self.key}/={self.number}"


@dataclass
class _Sight:
    """What was last seen of one object.

    Attributes:
        mark: Another when its member has put it again.
        since: When that was, by this process's monotonic clock; not later.
        ttl_s: How long it counts from then.
        value: What it says.
    """

    mark: tuple[datetime, str]
    since: float
    ttl_s: int
    value: bytes


class BucketMembers:
    """Looks at members.

    Args:
        client: Where they are.
    """

    def __init__(self, client: ObjectClient) -> None:
        self._client = client
        self._sights: dict[_Name, _Sight] = {}

    async def read(self, key: str) -> bytes | None:
        """Return a member's value; None: no such member is alive."""
        return (await self.alive(key)).get(key, (0, None))[1]

    async def alive(self, above: str) -> dict[str, tuple[int, bytes]]:
        """Return number and value of each living member whose key is `above`, or begins with it.

        Args:
            above: A key, or a prefix without its slash; empty: all.
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
        return BucketLease(self._client, key, _Name(key, number).path, body, ttl_s)

    async def _see(self, names: dict[_Name, ObjectFacts]) -> None:
        """Note which objects have changed."""
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
    """One member's object."""

    def __init__(self, client: ObjectClient, key: str, path: str, body: bytes, ttl_s: int) -> None:
        self.key, self._ttl_s = key, ttl_s
        self._client, self._path, self._body = client, path, body
        self._writing = asyncio.Lock()

    async def renew(self) -> Renewal:
        """Put it again; who looks counts from when it sees that, so that a late one ends it."""
        async with self._writing:
            await self._client.put(self._path, self._body)
        return Renewal(self._ttl_s, kept=True)

    async def release(self) -> None:
        """Remove it."""
        async with self._writing:
            await self._client.delete([self._path])


def _parse(path: str) -> _Name | None:
    key, _, number = path.removeprefix(f"{_FOLDER}/").rpartition("/=")
    return _Name(key, int(number)) if key and number.isdecimal() else None


def _is_under(key: str, above: str) -> bool:
    return not above or key == above or key.startswith(f"{above}/")
