"""What the ranks of an engine do beside generation, one thing at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync import clock
from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.rejection import reject
from weightsync_server.engine.unfinished import unfinished, write_down

if TYPE_CHECKING:
    from weightsync_server.engine.journal import Journal
    from weightsync_server.engine.live_check import LiveChecks
    from weightsync_server.engine.model_parts import ModelParts
    from weightsync_server.engine.prefetch import Prefetcher
    from weightsync_server.engine.session import EngineSession
    from weightsync_server.engine.version_loads import LoadScheduler

__all__ = ["BackgroundWork"]

#: How long the disk is left alone after it refused a record, seconds.
_RETRY_S = 5.0


class BackgroundWork:
    """Has the ranks load, compare, read ahead and unmap; called by who has the engine for itself.

    Args:
        journal: Of the engine.
        model: What it serves.
        checks: Compares the live parameters as a whole.
        prefetcher: Has the ranks read what comes in.
    """

    def __init__(
        self, journal: Journal, model: ModelParts, checks: LiveChecks, prefetcher: Prefetcher
    ) -> None:
        self._journal = journal
        self._write_at = 0.0
        self._model = model
        self._checks = checks
        self._prefetcher = prefetcher

    async def attend(self, session: EngineSession, *, sleeping: bool) -> None:
        """Begin what is to be done; returns as soon as the ranks have begun."""
        await self._use_ranks(session, sleeping=sleeping)
        await self._write_down(session)

    async def _use_ranks(self, session: EngineSession, *, sleeping: bool) -> None:
        # Beside a comparison a rank unmaps nothing.
        if self._checks.running:
            return
        if not sleeping:
            await self._occupy(session)
        elif session.loads is not None:
            session.loads.sleep()
        # Retired segments count in the budget until every rank has unmapped them.
        segments = self._model.segments
        retired = segments.retired
        if (retired or not session.tidy) and not self._checks.running:
            existing = segments.exposed_to(self._journal.engine) - retired
            mapped = await session.unmap(existing, self._prefetcher.name)
            if mapped is not None:
                segments.release(retired - mapped, self._journal.engine)

    async def _write_down(self, session: EngineSession) -> None:
        # What the disk refused when it became live is written as soon as the disk takes it.
        live, now = session.live, clock.monotonic()
        if live is None or now < self._write_at:
            return
        if not self._journal.says_live(live.record.version):
            self._write_at = now + _RETRY_S
            intent = unfinished(self._journal, live)
            rejected = False
            if intent is not None and intent.cause.rejects:
                # A rollback that ended without its caller.
                cause = intent.cause
                rejected = await reject(self._model.serving, cause.rejects, cause.reason)
            await write_down(self._journal, live, rejected=rejected)

    async def _occupy(self, session: EngineSession) -> None:
        if session.loads is not None:
            self._load_newest(session, session.loads)
        if session.live is not None:
            self._checks.repeat(session.live)
        await self._checks.begin(session)
        if self._checks.running:
            self._prefetcher.interrupted()
        else:
            await self._prefetcher.begin(session)

    def _load_newest(self, session: EngineSession, loads: LoadScheduler) -> None:
        """Let the ranks load the version that is likely to be applied next, if it is staged."""
        live = session.live.record if session.live is not None else None
        if live is not None and not loads.progress() and live.residency == pb.RESIDENCY_STAGED:
            # Nothing is known of their loaders, as after a sleep: it takes time to start one.
            loads.begin(live)
            return
        try:
            newest = self._model.table.newest_applicable([self._journal.engine])
        except WeightSyncError:
            return
        after = live is None or newest.order > live.order
        if after and newest.residency == pb.RESIDENCY_STAGED:
            loads.begin(newest)
