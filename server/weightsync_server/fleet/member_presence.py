"""That a member is there: its key in the register, and since when others have seen it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import WeightSyncError
from weightsync_server.fleet.fleet_keys import member_key
from weightsync_server.fleet.fleet_records import decode_boot

if TYPE_CHECKING:
    from weightsync_server.register.membership import Membership
    from weightsync_server.register.register import Register

__all__ = ["MemberPresence"]


class MemberPresence:
    """Keeps a member's key in the register.

    Whoever begins a barrier waits for all whose keys are there. So what a member has read counts
    for as long as its key was there all the time since: no barrier can have been committed of which
    it does not know.

    Args:
        register: The fleet's.
        name: Of the member.
        ttl_s: After which a key that is not renewed is gone.

    Attributes:
        boot: Names this process.
    """

    def __init__(self, register: Register, name: str, ttl_s: int) -> None:
        self._register, self._key, self._ttl_s = register, member_key(name), ttl_s
        self._membership: Membership | None = None
        self._read_at = -1.0
        self.boot = secrets.token_hex(8)

    async def announce(self, value: bytes) -> None:
        """Be there, with this value.

        Raises:
            WeightSyncError: Others may not see that.
        """
        before = self._membership
        self._membership = await self._register.member(self._key, value, self._ttl_s)
        if before is not None:
            self._membership.follow(before)
            await before.close()

    async def renew(self) -> None:
        """Be there still, or again; nothing where it was never announced.

        Raises:
            WeightSyncError: Others may not see that.
        """
        if self._membership is not None:
            await self._membership.renew()

    async def close(self) -> None:
        """Be gone, so that nothing that was read counts until this is announced again."""
        membership, self._membership = self._membership, None
        if membership is not None:
            await membership.close()

    async def found(self) -> bytes | None:
        """Return who has the name now.

        Raises:
            WeightSyncError: The register does not answer.
        """
        return await self._register.get(self._key)

    def is_others(self, found: bytes) -> bool:
        """Return whether that is another process."""
        try:
            return decode_boot(found) != self.boot
        except WeightSyncError:
            # Of another release.
            return True

    def has_read(self, asked_at: float) -> None:
        """Take note of when what is known now was asked for, by `clock.boottime`."""
        self._read_at = asked_at

    @property
    def counts(self) -> bool:
        """Whether others have seen this member at any time since then."""
        return self._membership is not None and self._membership.is_seen_since(self._read_at)

    @property
    def left_s(self) -> float:
        """For how many seconds from now others see this member at least."""
        until = self._membership.valid_until if self._membership is not None else 0.0
        return until - clock.boottime()
