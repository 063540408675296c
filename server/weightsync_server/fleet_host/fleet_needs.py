"""Which contents a fleet still needs, so that nobody who shares a store with it removes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_keys import MEMBERS
from weightsync_server.fleet.fleet_records import decode_member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightsync_server.fleet.fleet_history import History
    from weightsync_server.fleet.fleet_plan import FleetVersion
    from weightsync_server.register.register import Register

__all__ = ["FleetNeeds"]


class FleetNeeds:
    """Reads what members serve, and where they may go by what is planned or decided.

    Args:
        register: The fleet's.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self._reader = HistoryReader(register)

    async def contents(self) -> frozenset[str]:
        """Return the digests of what members serve, go to, and would go back to.

        A plan that begins after this call may name any other version: who finds it gone is not
        ready for it.

        Raises:
            WeightSyncError: The register cannot be read; NOT_SUPPORTED: something in it is of a
                newer release. Then everything is needed.
        """
        # Members first: what they go to meanwhile is in the history.
        members, _ = await self._register.members(MEMBERS)
        history = await self._reader.read()
        if history.unreadable:
            raise WeightSyncError(Reason.NOT_SUPPORTED, history.unreadable)
        served = (decode_member(value)[0] for value in members.values())
        needed = [*served, *_planned(history)]
        return frozenset(version.digest for version in needed if version is not None)


def _planned(history: History) -> Iterator[FleetVersion | None]:
    if history.newest is not None:
        yield history.newest.plan.target
        yield history.newest.plan.previous
    commits = [one.plan for one in history.commits]
    if not commits:
        return
    live = commits[-1].target
    yield live
    before = [commits[0].previous, *(plan.target for plan in commits[:-1])]
    # What a rollback would go to.
    good = (one for one in reversed(before) if one is not None and one.digest != live.digest)
    yield next((one for one in good if one.digest not in history.rejects), None)
