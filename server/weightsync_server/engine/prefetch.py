"""Ranks that read a version while it still comes in, so that an apply after a push is sooner done.

Nothing rests on it: a rank that has read nothing ahead reads all when the version is prepared, and
what was read ahead is proved as all else is, by digests that begin afterwards.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from weightsync import clock
from weightsync.engine import READ_AHEAD
from weightsync.errors import WeightSyncError
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine.session import EngineSession
from weightsync_server.residency.incoming import IncomingReader

logger = logging.getLogger(__name__)


#: How long what was read waits for its apply before the next version takes its place, seconds.
_WAITS_S = 5.0


class Prefetcher:
    """Has the ranks read the version that came in last; `wake` has `begin` called soon."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._coming: IncomingReader | None = None
        #: What the ranks have read last, and how they call it; whether they are still at it.
        self._read: tuple[IncomingReader, str] | None = None
        self._reading = False

    def note(self, arriving: IncomingReader) -> None:
        self._coming = arriving
        self._wake()

    def name_of(self, record: VersionRecord) -> str:
        """Return how the ranks call what they read of a version as it came in; "": nothing."""
        if self._read is None or self._read[0].record is not record or not self._read[0].stays:
            return ""
        return self._read[1]

    @property
    def name(self) -> str:
        """How the ranks call what they are reading; "": nothing."""
        return self._read[1] if self._read is not None and self._reading else ""

    @property
    def wanted(self) -> bool:
        return self._coming is not None and self._coming.ended_at is None and not self._at_it

    def interrupted(self) -> None:
        """Take note that the ranks were asked for something else, which has ended their reading."""
        self._reading = False

    def forget(self) -> None:
        self._read, self._reading = None, False

    async def begin(self, session: EngineSession) -> None:
        coming = self._coming
        if coming is None or not self.wanted or not _able(session) or self._waits(session):
            return
        known = self._read is not None and self._read[0] is coming
        name = self._read[1] if self._read and known else f"ahead-{secrets.token_hex(8)}"
        try:
            document = await coming.offer()
            if document:
                await session.ranks.start_prefetch(name, document)
                self._read, self._reading = (coming, name), True
        except WeightSyncError as error:
            self._coming = None
            logger.warning(
                "version %d is read when it is complete: %s", coming.record.version, error.message
            )

    @property
    def _at_it(self) -> bool:
        return self._reading and self._read is not None and self._read[0] is self._coming

    def _waits(self, session: EngineSession) -> bool:
        """Tell whether another version was read that is complete and may be applied any time."""
        if self._read is None or session.live is None or self._read[0] is self._coming:
            return False
        waiting = self._read[0]
        newer = waiting.record.order > session.live.record.order
        ended = waiting.ended_at
        late = ended is not None and clock.monotonic() - ended > _WAITS_S
        return newer and waiting.stays and ended is not None and not late


def _able(session: EngineSession) -> bool:
    live = session.live
    return (
        READ_AHEAD in session.info.capabilities
        and live is not None
        and any(report.device.room for report in live.reports)
    )
