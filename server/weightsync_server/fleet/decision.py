"""A decision: created once, by whoever comes first."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, overload

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_keys import MEMBERS, decision_key, member_key
from weightsync_server.fleet.fleet_records import decode_verdict, encode_verdict

if TYPE_CHECKING:
    from collections.abc import Collection

    from weightsync_server.fleet.fleet_plan import Verdict
    from weightsync_server.register.register import Register

__all__ = ["UNKNOWN_OUTCOMES", "create_until_answered", "decide"]

logger = logging.getLogger(__name__)

#: After these nobody knows whether the key exists, or will.
UNKNOWN_OUTCOMES = (Reason.DEADLINE_EXCEEDED, Reason.FAULT, Reason.DISK_EXHAUSTED)
_PAUSE_S = 0.2


async def decide(
    register: Register,
    number: int,
    step: int,
    verdict: Verdict,
    by: str,
    reason: str = "",
    *,
    among: Collection[str] = (),
) -> Verdict | None:
    """Return what is decided, by this call or by another that was first.

    A time-out decides nothing: the create is repeated until the register answers, for as long as
    it takes; the caller bounds that. A call that is given up may still decide later.

    Args:
        register: The fleet's.
        number: Of the apply.
        step: Of the decision.
        verdict: What to decide.
        by: Who decides.
        reason: Why.
        among: Names of the members for whom this is decided: nothing is while another is there;
            none: whoever is there.

    Returns:
        None: another is there, and nothing was decided by this call.

    Raises:
        WeightSyncError: PERMISSION_DENIED, UNAUTHENTICATED, NOT_SUPPORTED: this caller decides
            nothing.
    """
    await failpoints.reach("fleet.decide")
    value = encode_verdict(verdict, by, reason)
    found = await create_until_answered(register, decision_key(number, step), value, among)
    await failpoints.reach("fleet.decided")
    return decode_verdict(found)[0] if found is not None else None


@overload
async def create_until_answered(register: Register, key: str, value: bytes) -> bytes: ...
@overload
async def create_until_answered(
    register: Register, key: str, value: bytes, among: Collection[str]
) -> bytes | None: ...
async def create_until_answered(
    register: Register, key: str, value: bytes, among: Collection[str] = ()
) -> bytes | None:
    """Return what a key holds from now on, having created it where nobody had.

    Args:
        register: The fleet's.
        key: The key.
        value: What it is to hold.
        among: Names of the only members that may be there; none: whoever is.

    Returns:
        None: another is there, and nobody has created it.

    Raises:
        WeightSyncError: Anything but an unknown outcome.
    """
    while True:
        try:
            if not among:
                return (await register.create(key, value)).value
            keys = [member_key(name) for name in among]
            created = await register.create_among(key, value, MEMBERS, keys)
            return created.value if created is not None else None
        except WeightSyncError as error:
            if error.reason not in UNKNOWN_OUTCOMES:
                raise
            logger.warning("it is not known whether %s was created: %s", key, error)
        await asyncio.sleep(_PAUSE_S)
