"""What every register promises: a key is created once, changes are seen, members renew theirs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.ops.tasks import cancel_tasks

logger = logging.getLogger(__name__)


MAX_VALUE_BYTES = 4096
#: Fits a file name, its slashes replaced.
_MAX_KEY = 200
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass(frozen=True)
class Creation:
    """What a key holds, for ever, after `create`.

    `created` means that this call is known to have created it. After a lost reply it may have, and
    this be False: where it matters who it was, the value has to say so.
    """

    created: bool
    value: bytes


class MemberList(NamedTuple):
    """Who is there: values of those whose processes renew their keys, by key.

    `permanent` are keys among theirs that were created and are no member's: they never go by
    themselves.
    """

    alive: dict[str, bytes]
    permanent: frozenset[str]


class CoordinationStore(Protocol):
    """Keeps small values under keys. Safety may rest on `create` and `get`, and on nothing else.

    Keys are names of letters, digits, `.`, `_` and `-` with `/` between them, at most 200
    characters. One is either created or a member's, never both.
    """

    url: str

    async def create(self, key: str, value: bytes) -> Creation:
        """Create a key that does not exist, or return what it holds; durable when this returns.

        Of all that create a key, one is the winner, and everybody reads its value from then on.

        Raises:
            WeightSyncError: REQUEST_INVALID: nothing was done. DEADLINE_EXCEEDED, FAULT,
                DISK_EXHAUSTED: it is not known whether the key exists, and it may come to be at any
                later time, so that even a `get` that finds nothing decides nothing; call `create`
                again until it answers. PERMISSION_DENIED, UNAUTHENTICATED: this caller never can.
        """

    async def create_among(
        self, key: str, value: bytes, prefix: str, known: Collection[str]
    ) -> Creation | None:
        """Create a key as `create` does; None: a member is there but those, and nothing was done.

        In a bucket somebody may still appear in the moment between the two. `prefix` is that of the
        members' keys, as in `list`, and `known` are the keys of those members.
        """

    async def members(self, prefix: str) -> MemberList:
        """Return who is there below a prefix, as linearisable as `list`."""

    async def get(self, key: str) -> bytes | None:
        """Return what a key holds, None: it did not exist at some time during this call.

        Linearisable: what any `create` has returned or any `get` has read before is seen. When this
        raises, as `create` does, nothing was read.
        """

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        """Return all keys that begin with a prefix, sorted, with values: as linearisable as `get`.

        `prefix` ends in `/`, or is empty for all keys. Keys before `start` are not read.
        """

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        """Return the keys below several prefixes, as `list` does, with fewer calls where it can.

        What is read of one prefix is no older than what is read of those before it. No prefix lies
        below another. Keys below the first of them that come before `start` are not read.
        """

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove keys that were created and are no member's; those that are not there are fine.

        A create that was given up may bring a key back at any later time: remove only what nobody
        will believe again. When this raises, some may be gone.
        """

    def watch(self, prefix: str) -> AsyncGenerator[frozenset[str], None]:
        """Yield which keys have changed; empty: any may have, read all that matters.

        A hint and never a promise: it comes late, or twice, or for nothing. It begins with an empty
        one, which also follows each break and comes about twice a minute, so that whoever reads at
        each hint lags but misses nothing for ever. It goes on until the caller closes it, and
        raises PERMISSION_DENIED, UNAUTHENTICATED; for files FAULT.
        """

    async def member(self, key: str, value: bytes, ttl_s: int) -> Membership:
        """Put a key there that stays as long as this process renews it, and `close` removes.

        A second one with the same key takes its place; REQUEST_INVALID where the key was created.
        `ttl_s` is the whole seconds after the last renewal at which others stop to see it; etcd
        takes two at least, and more around an election, a bucket up to two more.
        """

    async def close(self) -> None:
        """Let go of connections; members end by their time unless they were closed before."""


async def list_in_turn(
    coordination: CoordinationStore, prefixes: Sequence[str], start: str
) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for at, prefix in enumerate(prefixes):
        found |= await coordination.list(prefix, "" if at else start)
    return found


def check_key(key: str) -> str:
    if len(key) > _MAX_KEY or not _KEY.fullmatch(key):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"a register cannot have the key {key[: _MAX_KEY + 20]!r}; use names of letters, "
            f"digits, '.', '_' and '-' with '/' between them, {_MAX_KEY} characters at most",
        )
    return key


def not_creatable(key: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, f"{key} belongs to a member; create another key")


def check_prefix(prefix: str) -> str:
    if prefix and not prefix.endswith("/"):
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"the prefix {prefix[:220]!r} ends within a name; add a '/'"
        )
    if prefix:
        check_key(prefix[:-1])
    return prefix


def check_value(key: str, value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"the value of {key} has {len(value)} bytes, but a register takes at most "
            f"{MAX_VALUE_BYTES}; put it into the store, and its digest here",
        )
    return value


#: After how long it tells that anything may have changed, whatever it saw, seconds.
_BACKSTOP_S = 30.0


class KeyChanges:
    def __init__(self) -> None:
        self._before: Mapping[str, object] = {}
        self._all_at = -_BACKSTOP_S

    def see(self, now: Mapping[str, object]) -> frozenset[str] | None:
        """Return the keys that changed: empty if any may have, None if nothing did.

        `now` maps each key to what changes with its value or its holder.
        """
        before, self._before = self._before, now
        if clock.monotonic() >= self._all_at + _BACKSTOP_S:
            self._all_at = clock.monotonic()
            return frozenset()
        changed = frozenset(key for key, _ in before.items() ^ now.items())
        return changed or None

    def lost(self) -> None:
        self._all_at = -_BACKSTOP_S


#: Of its time, so that two renewals may fail before the third is too late.
_RENEWALS = 3
#: Longest wait for a renewal before the key is removed, seconds.
_QUIET_S = 2.0


class Renewal(NamedTuple):
    """What became of a renewal: the key stays for `seconds` from when it was asked for.

    If `kept` is False, the key may have been gone, or another's.
    """

    seconds: float
    kept: bool


class MemberLease(Protocol):
    key: str

    async def renew(self) -> Renewal:
        """See that the key is there for another `ttl_s` or more, as it was or anew."""

    async def release(self) -> None:
        """Remove the key; when this raises, it may stay until its time is over."""


class Membership:
    """Renews a member's key in a task of its own.

    Its times are by `clock.boottime`, which passes also while this process stands still. Others
    have seen the key at all times since `seen_since`, and see it at least until `valid_until`; a
    member that finds that past cannot rely on what it read before.
    """

    def __init__(self, lease: MemberLease, ttl_s: int) -> None:
        if ttl_s < 1:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"a member is to be renewed within {ttl_s} s; give it a second or more",
            )
        self._lease, self._ttl_s = lease, ttl_s
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self.seen_since = self.valid_until = 0.0

    async def start(self) -> Self:
        await self.renew()
        self._task = asyncio.create_task(self._keep(), name=f"member {self._lease.key}")
        return self

    async def close(self) -> None:
        """Remove the key; where the register does not answer, its time does that."""
        if self._task is None:
            return
        quiet = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_S):
                # A renewal that is under way may come to the register after the removal.
                quiet = await self._turn.acquire()
        await cancel_tasks(self._task)
        self._task = None
        if quiet:
            self._turn.release()
        with contextlib.suppress(WeightSyncError):
            await self._lease.release()

    async def renew(self) -> None:
        """Return when others see the key, for all of its time; else raise `WeightSyncError`."""
        async with self._turn:
            # The register counts from when it is asked, or from later.
            asked = clock.boottime()
            seconds, kept = await self._lease.renew()
            answered = clock.boottime()
            if not kept or answered >= self.valid_until:
                self.seen_since = answered
            self.valid_until = asked + seconds

    def follow(self, before: Membership) -> None:
        if before.valid_until > self.seen_since:
            self.seen_since = min(self.seen_since, before.seen_since)

    def is_seen_since(self, moment: float) -> bool:
        return self.seen_since <= moment and clock.boottime() < self.valid_until

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS)
            try:
                await self.renew()
            except WeightSyncError as error:
                logger.warning("member %s was not renewed: %s", self._lease.key, error)
            except Exception:
                # Whatever it was, the next try may go well, and without one the member is lost.
                logger.exception("member %s was not renewed", self._lease.key)
