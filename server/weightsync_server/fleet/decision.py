"""A decision: created once, by whoever comes first."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_keys import decision_key
from weightsync_server.fleet.fleet_records import decode_verdict, encode_verdict

if TYPE_CHECKING:
    from weightsync_server.fleet.fleet_plan import Verdict
    from weightsync_server.register.register import Register

__all__ = ["UNKNOWN_OUTCOMES", "create_until_answered", "decide"]

logger = logging.getLogger(__name__)

#: After these nobody knows whether the key exists, or will.
UNKNOWN_OUTCOMES = (Reason.DEADLINE_EXCEEDED, Reason.FAULT, Reason.DISK_EXHAUSTED)
_PAUSE_S = 0.2


async def decide(
    register: Register, number: int, step: int, verdict: Verdict, by: str, reason: str = ""
) -> Verdict:
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

    Raises:
        WeightSyncError: PERMISSION_DENIED, UNAUTHENTICATED, NOT_SUPPORTED: this caller decides
            nothing.
    """
    await failpoints.reach("fleet.decide")
    value = encode_verdict(verdict, by, reason)
    found = await create_until_answered(register, decision_key(number, step), value)
    await failpoints.reach("fleet.decided")
    return decode_verdict(found)[0]


async def create_until_answered(register: Register, key: str, value: bytes) -> bytes:
    """Return what a key holds from now on, having created it where nobody had.

    Raises:
        WeightSyncError: Anything but an unknown outcome.
    """
    while True:
        try:
            return (await register.create(key, value)).value
        except WeightSyncError as error:
            if error.reason not in UNKNOWN_OUTCOMES:
                raise
            logger.warning("it is not known whether %s was created: %s", key, error)
        await asyncio.sleep(_PAUSE_S)
