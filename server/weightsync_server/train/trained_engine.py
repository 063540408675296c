"""The engine in whose memory the trainer works."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.engine import EngineApplier, EngineSet

__all__ = ["TrainedEngine"]

#: From one look at an engine that does not serve to the next, seconds.
_LOOK_S = 0.2


class TrainedEngine:
    """What there is to know of it.

    Args:
        engines: Of this host.
        table: The versions.
        name: Its name; "": the only one.
    """

    def __init__(self, engines: EngineSet, table: VersionTable, name: str) -> None:
        self._engines = engines
        self._table = table
        self._name = name

    @property
    def away(self) -> str:
        """Why nothing can be trained in it now; "": it serves."""
        try:
            applier = self._applier()
        except WeightSyncError as error:
            return error.message
        if applier.supervisor.serving and applier.supervisor.served.live:
            return ""
        return f"engine {applier.name} does not serve a version yet"

    @property
    def live(self) -> VersionRecord:
        """The version that it serves.

        Raises:
            WeightSyncError: ENGINE_AWAY, or REQUEST_INVALID: which engine it is is not known.
        """
        applier = self._applier()
        record = self._table.find(applier.supervisor.served.live)
        if record is None:
            raise WeightSyncError(Reason.ENGINE_AWAY, f"{self.away}; call again when it does")
        return record

    @property
    def settled_version(self) -> int:
        """The version that it serves, if that stays; 0: none, or it may be taken back yet."""
        try:
            record = self.live
        except WeightSyncError:
            return 0
        return record.version if record.commit is not None and not record.in_place else 0

    @property
    def loaded(self) -> frozenset[str] | None:
        """What the engines of this host have loaded, this one or not; None: one has not told."""
        return self._engines.loaded

    async def wait_serving(self) -> None:
        """Return when it serves."""
        while self.away:  # noqa: ASYNC110 - engines come and go; nobody tells of each
            await asyncio.sleep(_LOOK_S)

    def _applier(self) -> EngineApplier:
        found = self._engines.named(self._name)
        if len(found) > 1:
            names = ", ".join(applier.name for applier in found)
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"this host has several engines; name one of {names} with --trainer-engine",
            )
        return found[0]
