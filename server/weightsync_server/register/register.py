"""What every register promises: a key is created once, and whoever reads it reads that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Sequence

    from weightsync_server.register.membership import Membership

__all__ = [
    "MAX_VALUE_BYTES",
    "Creation",
    "MemberList",
    "Register",
    "check_key",
    "check_prefix",
    "check_value",
    "list_in_turn",
    "not_creatable",
]

MAX_VALUE_BYTES = 4096
#: Fits a file name, its slashes replaced.
_MAX_KEY = 200
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass(frozen=True)
class Creation:
    """What a key holds after `create`.

    Attributes:
        created: This call is known to have created it. After a lost reply it may have, and this be
            False: where it matters who it was, the value has to say so.
        value: What the key holds, for ever.
    """

    created: bool
    value: bytes


class MemberList(NamedTuple):
    """Who is there.

    Attributes:
        alive: Values of those whose processes renew their keys, by key.
        permanent: Keys among theirs that were created and are no member's: nobody renews them, and
            they never go by themselves.
    """

    alive: dict[str, bytes]
    permanent: frozenset[str]


class Register(Protocol):
    """Keeps small values under keys. Safety may rest on `create` and `get`, and on nothing else.

    Keys are names of letters, digits, `.`, `_` and `-` with `/` between them, at most 200
    characters. One is either created or a member's, never both.

    Attributes:
        url: Where it is.
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
        """Create a key as `create` does, while no member is there but those.

        In a bucket somebody may still appear in the moment between the two.

        Args:
            key: The key.
            value: Its value.
            prefix: Of the members' keys, as in `list`.
            known: Their keys.

        Returns:
            None: another member is there, and this call has created nothing.

        Raises:
            WeightSyncError: As `create`.
        """

    async def members(self, prefix: str) -> MemberList:
        """Return who is there below a prefix, as linearisable as `list`.

        Args:
            prefix: As in `list`.

        Raises:
            WeightSyncError: As `get`.
        """

    async def get(self, key: str) -> bytes | None:
        """Return what a key holds, None: it did not exist at some time during this call.

        Linearisable: what any `create` has returned or any `get` has read before is seen.

        Raises:
            WeightSyncError: As `create`; nothing was read.
        """

    async def list(self, prefix: str, start: str = "") -> dict[str, bytes]:
        """Return all keys that begin with a prefix, sorted, with values: as linearisable as `get`.

        Args:
            prefix: Ends in `/`, or is empty for all keys.
            start: Keys before it are not read.

        Raises:
            WeightSyncError: As `get`.
        """

    async def list_each(self, prefixes: Sequence[str], start: str = "") -> dict[str, bytes]:
        """Return the keys below several prefixes, as `list` does, with fewer calls where it can.

        What is read of one prefix is no older than what is read of those before it.

        Args:
            prefixes: Each as in `list`, none below another.
            start: Keys below the first of them that come before it are not read.

        Raises:
            WeightSyncError: As `get`.
        """

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove keys that were created and are no member's; those that are not there are fine.

        A create that was given up may bring a key back at any later time: remove only what nobody
        will believe again.

        Raises:
            WeightSyncError: As `create`; some may be gone.
        """

    def watch(self, prefix: str) -> AsyncGenerator[frozenset[str], None]:
        """Yield which keys have changed; empty: any may have, read all that matters.

        A hint and never a promise: it comes late, or twice, or for nothing. It begins with an empty
        one, which also follows each break and comes about twice a minute, so that whoever reads at
        each hint lags but misses nothing for ever. It goes on until the caller closes it.

        Args:
            prefix: As in `list`.

        Raises:
            WeightSyncError: PERMISSION_DENIED, UNAUTHENTICATED; for files FAULT.
        """

    async def member(self, key: str, value: bytes, ttl_s: int) -> Membership:
        """Put a key there that stays as long as this process renews it, and `close` removes.

        A second one with the same key takes its place.

        Args:
            key: The key.
            value: Its value.
            ttl_s: Whole seconds after the last renewal at which others stop to see it; etcd takes
                two at least, and more around an election, a bucket up to two more.

        Raises:
            WeightSyncError: As `create`, and REQUEST_INVALID where the key was created.
        """

    async def close(self) -> None:
        """Let go of connections; members end by their time unless they were closed before."""


async def list_in_turn(register: Register, prefixes: Sequence[str], start: str) -> dict[str, bytes]:
    """Return what `Register.list_each` does, by one list for each prefix."""
    found: dict[str, bytes] = {}
    for at, prefix in enumerate(prefixes):
        found |= await register.list(prefix, "" if at else start)
    return found


def check_key(key: str) -> str:
    """Return the key.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if len(key) > _MAX_KEY or not _KEY.fullmatch(key):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"a register takes no key {key[: _MAX_KEY + 20]!r}; use names of letters, digits, '.', "
            f"'_' and '-' with '/' between them, {_MAX_KEY} characters at most",
        )
    return key


def not_creatable(key: str) -> WeightSyncError:
    """Return the refusal to create a key that a member has."""
    return WeightSyncError(Reason.REQUEST_INVALID, f"{key} is a member's; create another key")


def check_prefix(prefix: str) -> str:
    """Return the prefix of keys.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if prefix and not prefix.endswith("/"):
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"the prefix {prefix[:220]!r} ends within a name; add a '/'"
        )
    if prefix:
        check_key(prefix[:-1])
    return prefix


def check_value(key: str, value: bytes) -> bytes:
    """Return the value.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if len(value) > MAX_VALUE_BYTES:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"the value of {key} has {len(value)} bytes, and a register takes {MAX_VALUE_BYTES}; "
            "put it into the store and its digest here",
        )
    return value
