"""Ranks that read a version while it still comes in: what they have read is not read again.

It shortens what lies between the last byte of a push and an apply. Nothing rests on it: a rank that
has read nothing ahead reads all when the version is prepared, and what was read ahead is proved as
all else is, by digests that begin afterwards.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from weightsync.engine import READ_AHEAD
from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightsync_server.apply.session import Session
    from weightsync_server.versions import Arriving, VersionRecord

__all__ = ["Ahead"]

logger = logging.getLogger(__name__)


class Ahead:
    """Has the ranks read the version that came in last.

    Args:
        wake: Has `begin` called soon, by who has the engine for itself.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._coming: Arriving | None = None
        self._begun: tuple[VersionRecord, str] | None = None

    def note(self, arriving: Arriving) -> None:
        """Take note that a version begins to come in; the one before it is read no more."""
        self._coming = arriving
        self._wake()

    def name_of(self, record: VersionRecord) -> str:
        """Return how the ranks call what they read of a version as it came in; "": nothing."""
        return self._begun[1] if self._begun is not None and self._begun[0] is record else ""

    @property
    def name(self) -> str:
        """How the ranks call what they read last; "": nothing."""
        return self._begun[1] if self._begun is not None else ""

    def forget(self) -> None:
        """Take note that the ranks are others."""
        self._begun = None

    async def begin(self, session: Session) -> None:
        """Let the ranks read what comes in, if they can; returns as soon as they have begun."""
        coming, self._coming = self._coming, None
        if coming is None or coming.ended or not _able(session):
            return
        name = f"ahead-{secrets.token_hex(8)}"
        try:
            document = await coming.offer()
            if not document:
                return
            self._begun = coming.record, name
            await session.ranks.start_ahead(name, document)
        except WeightSyncError as error:
            self._begun = None
            logger.warning(
                "version %d is read when it is complete: %s", coming.record.version, error.message
            )


def _able(session: Session) -> bool:
    live = session.live
    return (
        READ_AHEAD in session.info.capabilities
        and live is not None
        and any(report.device.room for report in live.reports)
    )
