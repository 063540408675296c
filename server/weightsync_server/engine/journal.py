"""The journal of applies: INTENT before the first write to a parameter, DONE after the last.

A record tells, too, who asked with which key, and a DONE what was answered, so that a call that is
repeated to the next server is not done twice. Of engines that go together one record tells for all:
INTENT, then COMMIT before the first of them resumes, then DONE. An INTENT without a COMMIT is no
decision, so that all of them go back.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync_server.engine.journal_file import HOST, Answer, Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.journal_file import JournalFile
    from weightsync_server.engine.outcome import CutoverPlan, PreparedVersion

__all__ = ["HostJournal", "Journal", "disk_errors_logged", "live_in_store"]

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def disk_errors_logged() -> Iterator[None]:
    """Go on whatever the disk says: the ranks are proved, and asked after a crash."""
    try:
        yield
    except (OSError, WeightSyncError) as error:
        logger.critical("what is live is not written down yet: %s", error)


class Journal:
    """What the journal says of one engine, and where its applies are written down.

    Args:
        file: Of all engines of this host.
        engine: Name of the engine.
    """

    def __init__(self, file: JournalFile, engine: str = "") -> None:
        self.engine = engine
        self._file = file

    def _entries(self) -> Iterator[Entry]:
        """Yield the records that count for the engine, newest first."""
        return (entry for entry in self._file.newest_first() if entry.counts_for(self.engine))

    @property
    def last(self) -> Entry | None:
        """The newest good record."""
        return next(self._entries(), None)

    @property
    def live(self) -> tuple[int, int]:
        """Live version and the one before, as of the last DONE or COMMIT; 0: none.

        Of an engine that was never here what another one of this host has.
        """
        for entries in (self._entries(), self._file.newest_first()):
            for entry in entries:
                if entry.event != "INTENT":
                    return entry.meant_for(self.engine), entry.previous
        return 0, 0

    @property
    def decided(self) -> int:
        """The version that was decided for all engines together, and none was for this one since.

        0: what it holds, proved, may stay.
        """
        begun: set[int] = set()
        for entry in self._entries():
            if entry.engine == HOST:
                version = entry.meant_for(self.engine)
                # What was begun since may have been to place it.
                return version if begun <= {version} else 0
            if entry.event == "DONE":
                break
            begun.add(entry.version)
        return 0

    @property
    def live_in_store(self) -> int:
        """Live version, if the newest record says that it is in the store of today; 0: it is not.

        An INTENT says nothing of that.
        """
        last = self.last
        if last is None or not last.store or last.store != self._file.store:
            return 0
        return last.meant_for(self.engine)

    def answered(self, key: str) -> Entry | None:
        """Return the DONE that answered a key; None: it is new, or was answered long ago."""
        return self._file.answered(key)

    def says_live(self, version: int) -> bool:
        """Whether the newest record is that this version is live."""
        last = self.last
        return last is not None and (last.event, last.meant_for(self.engine)) == ("DONE", version)

    async def intent(self, plan: CutoverPlan) -> None:
        """Write down what an apply is about to do, before it pauses or writes anything.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; the record does not count.
        """
        # Not of its DONE: that ends for one engine what began for one.
        bases = {self.engine: plan.base.record.version} if plan.for_host else {}
        await self._file.append(replace(self._intent(plan), bases=bases))

    async def intent_to_place(self, target: PreparedVersion) -> None:
        """Write down that a version is about to be placed in an engine that stands still.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; the record does not count.
        """
        await self._file.append(self._entry("INTENT", target))

    async def done(self, plan: CutoverPlan, answer: Answer) -> None:
        """Write down that an apply has ended well, and what its caller is answered.

        After the resume, so that no fsync lies in the pause: after a crash in between the ranks
        themselves are asked what they hold. For that reason it raises nothing that the disk says.
        """
        with disk_errors_logged():
            await self._end(self._intent(plan), plan.target, answer)
            await failpoints.reach("apply.done")

    async def restored(self, plan: CutoverPlan, answer: Answer) -> None:
        """Write down that an apply has ended with its base, and what its caller is answered."""
        done = self._entry("DONE", plan.base)
        done = replace(done, apply_id=plan.target.apply_id, cause=plan.cause)
        with disk_errors_logged():
            await self._end(done, plan.base, answer)

    async def finish(self, intent: Entry, current: PreparedVersion, answer: Answer) -> None:
        """Write down that an apply which nobody saw the end of is found done, and its answer.

        Args:
            intent: What it was about to do.
            current: What every rank holds, which is just that.
            answer: For its caller, when he repeats the call.
        """
        if intent.bases:
            # Those that were away are to come to it as well.
            intent = replace(intent, engine=HOST, bases={})
        with disk_errors_logged():
            await self._end(intent, current, answer)

    async def found(self, current: PreparedVersion) -> None:
        """Write down what every rank is found to hold."""
        with disk_errors_logged():
            await self._end(self._entry("DONE", current), current)

    async def _end(
        self, entry: Entry, current: PreparedVersion, answer: Answer | None = None
    ) -> None:
        # What it rejects is rejected by now.
        cause = replace(entry.cause, rejects=0, reason="")
        store = self._file.store if current.record.commit is not None else ""
        kept = answer if cause.key else None
        await self._file.append(replace(entry, event="DONE", cause=cause, answer=kept, store=store))

    def _entry(self, event: str, current: PreparedVersion) -> Entry:
        # A version that is placed again keeps its way back.
        version, (live, before) = current.record.version, self.live
        return Entry(
            event,
            current.apply_id,
            version,
            before if version == live else live,
            engine=self.engine,
        )

    def _intent(self, plan: CutoverPlan) -> Entry:
        target, base = plan.target, plan.base.record.version
        version = target.record.version
        return Entry("INTENT", target.apply_id, version, base, plan.cause, engine=self.engine)


def live_in_store(file: JournalFile) -> frozenset[int]:
    """Return the versions that must be in the store of today, as engines served them last."""
    # Where all that was ever done was done for all engines, none is named.
    live = {Journal(file, engine).live_in_store for engine in file.engines() or {""}}
    return frozenset(live - {0})


class HostJournal:
    """Where applies of several engines together are written down: one record for all of them.

    Args:
        file: Of all engines of this host.
    """

    def __init__(self, file: JournalFile) -> None:
        self._file = file

    async def intent(self, plans: Mapping[str, CutoverPlan]) -> None:
        """Write down what engines are about to do together, by name, before one of them pauses.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; the record does not count.
        """
        await self._file.append(_together("INTENT", plans))

    async def commit(self, plans: Mapping[str, CutoverPlan]) -> None:
        """Decide that all go on with the target: from now on that is so, whatever happens.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; nothing is decided, so all go back.
        """
        await self._file.append(replace(_together("COMMIT", plans), bases={}))

    async def place(self, version: int) -> None:
        """Decide that all engines go to a version which none of them may have prepared.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; nothing is decided.
        """
        ended = (one for one in self._file.newest_first() if one.event != "INTENT")
        last = next(ended, None)
        live, before = (last.version, last.previous) if last is not None else (0, 0)
        previous = before if live == version else live
        apply_id = secrets.token_hex(8)
        await self._file.append(Entry("COMMIT", apply_id, version, previous, engine=HOST))

    async def done(self, plans: Mapping[str, CutoverPlan], answer: Answer) -> None:
        """Write down that all have ended well, and what their caller is answered."""
        record = next(iter(plans.values())).target.record
        done = replace(_together("DONE", plans), bases={})
        with disk_errors_logged():
            await self._end(done, answer, in_store=record.commit is not None)
            await failpoints.reach("host.done")

    async def restored(self, plans: Mapping[str, CutoverPlan], answer: Answer) -> None:
        """Write down that all have ended with what they served, and what the caller is answered."""
        done = _together("DONE", plans)
        live, before = Journal(self._file, next(iter(plans))).live
        previous = before if live == done.previous else live
        done = replace(done, version=done.previous, previous=previous)
        bases = [plan.base.record for plan in plans.values()]
        with disk_errors_logged():
            await self._end(done, answer, in_store=all(base.commit for base in bases))

    async def found(self, record: VersionRecord, engine: str) -> None:
        """Write down that all shall hold what those serve already that are there.

        Args:
            record: The version.
            engine: Name of one that serves it.
        """
        live, before = Journal(self._file, engine).live
        previous = before if live == record.version else live
        entry = Entry("DONE", "", record.version, previous, engine=HOST)
        with disk_errors_logged():
            await self._end(entry, Answer(), in_store=record.commit is not None)

    async def _end(self, entry: Entry, answer: Answer, *, in_store: bool) -> None:
        cause = replace(entry.cause, rejects=0, reason="")
        kept = answer if cause.key else None
        store = self._file.store if in_store else ""
        await self._file.append(replace(entry, cause=cause, answer=kept, store=store))


def _together(event: str, plans: Mapping[str, CutoverPlan]) -> Entry:
    first = next(iter(plans.values()))
    bases = {name: plan.base.record.version for name, plan in plans.items()}
    return Entry(
        event,
        first.target.apply_id,
        first.target.record.version,
        first.base.record.version,
        first.cause,
        engine=HOST,
        bases=bases,
    )
