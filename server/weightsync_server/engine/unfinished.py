"""Applies of which nobody saw the end: what the ranks hold tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync_server.engine import idempotency
from weightsync_server.engine.journal_file import HOST

if TYPE_CHECKING:
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.engine.journal import Journal
    from weightsync_server.engine.journal_file import Entry
    from weightsync_server.engine.outcome import PreparedVersion

__all__ = ["overruled", "unfinished", "write_down"]


def overruled(journal: Journal, table: VersionTable, proved: VersionRecord) -> bool:
    """Tell whether other content than an engine holds was decided for all engines of this host."""
    decided = table.find(journal.decided)
    return decided is not None and decided.content_digest != proved.content_digest


def unfinished(journal: Journal, current: PreparedVersion) -> Entry | None:
    """Return the apply that nobody saw the end of, if it made every rank hold this.

    One of several engines together counts only if it was decided.
    """
    last = journal.last
    if last is None or last.version != current.record.version:
        return None
    return last if last.event == ("COMMIT" if last.engine == HOST else "INTENT") else None


async def write_down(journal: Journal, current: PreparedVersion, *, rejected: bool = False) -> None:
    """Write down what every rank holds, when that is not what the journal says already.

    Args:
        journal: Where.
        current: What they hold. Who asked for it and has no answer yet gets one when he repeats
            his call.
        rejected: Whether the version that a rollback to this one left is rejected.
    """
    intent = unfinished(journal, current)
    if intent is not None:
        answer = idempotency.pack_recovered(intent, current, rejected=rejected)
        await journal.finish(intent, current, answer)
    elif not journal.says_live(current.record.version):
        await journal.found(current)
