"""The journal of applies: INTENT before the first write to a parameter, DONE after the last.

A record tells, too, who asked with which key, and a DONE what was answered, so that a call that is
repeated to the next server is not done twice. Of engines that go together one record tells for all:
INTENT, then COMMIT before the first of them resumes, then DONE. An INTENT without a COMMIT is no
decision, so that all of them go back. So it is for one engine whose apply has a gate: COMMIT says
that its probes have let the version go.

A torn or damaged tail is ignored; the last good record tells where an engine was meant to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine.outcome import ApplyCause, CutoverPlan, PreparedVersion
from weightsync_server.ops import durable_files

logger = logging.getLogger(__name__)


#: In place of the name of an engine: all engines that take part, together.
HOST = "*"
#: The file is started anew, with only what still counts, when it has grown to this many bytes.
_ROTATE_BYTES = 1 << 20
#: Answers that it then keeps, the newest; they may fill half of the file.
_ANSWERS = 256
#: Engines whose last records it then keeps, the newest.
_ENGINES = 256


@dataclass(frozen=True)
class Answer:
    """What a call with a key was told at its end.

    `reply` is the serialised response in base64, empty when the old version was restored; `refusal`
    is the sentence that said so, and `gate` how its gate ended, empty if that had let it go.
    """

    reply: str = ""
    refusal: str = ""
    gate: str = ""


@dataclass(frozen=True)
class Entry:
    """One record.

    Attributes:
        event: `INTENT` or `DONE`; between them, for engines that go together, `COMMIT`.
        apply_id: The attempt, also where it ended with another version than it was made for.
        version: For INTENT and COMMIT the target, for DONE what is live.
        previous: The version that was live before; 0: none.
        cause: Not given when an engine is healed, or when the call will not be repeated.
        answer: For DONE: what a call with a key was told.
        store: For DONE: digest of the URL of the store in which the version is committed; empty: in
            none that lasts.
        engine: Its name; `HOST`: those that go together; empty: the one of an earlier release.
        bases: For `HOST`, before a decision and where all went back: what engines served, by name.
            The record is of no other engine then. For the INTENT of one engine: what that served,
            where its end is one for all engines of this host.
        gated: For the INTENT and the COMMIT of one engine: without the COMMIT it goes back. A
            COMMIT of what it served before has it go back from what it serves already.
    """

    event: str
    apply_id: str
    version: int
    previous: int
    cause: ApplyCause = field(default_factory=ApplyCause)
    answer: Answer | None = None
    store: str = ""
    engine: str = ""
    bases: dict[str, int] = field(default_factory=dict)
    gated: bool = False

    def counts_for(self, engine: str) -> bool:
        if self.engine == HOST:
            return not self.bases or engine in self.bases
        return self.engine in ("", engine)

    def meant_for(self, engine: str) -> int:
        """Return what an engine shall hold as of this record; 0: what it held before."""
        if self.event == "INTENT":
            return self.bases.get(engine, self.previous)
        return self.bases.get(engine, self.version)


def _encode(entry: Entry) -> bytes:
    facts = asdict(entry)
    for name in ("cause", "answer"):
        # Only what says something is written, and most applies say neither.
        facts[name] = {key: value for key, value in (facts[name] or {}).items() if value}
    body = json.dumps(
        {key: value for key, value in facts.items() if value not in ({}, "") and value is not False}
    ).encode()
    return f"{xxhash.xxh3_64_hexdigest(body)} ".encode() + body + b"\n"


def _decode(line: bytes) -> Entry | None:
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != xxhash.xxh3_64_hexdigest(body).encode():
        return None
    facts: dict[str, Any] = json.loads(body)
    answer = facts.pop("answer", None)
    cause = ApplyCause(**facts.pop("cause", {}))
    return Entry(**facts, cause=cause, answer=Answer(**answer) if answer else None)


class JournalFile:
    """An append-only file, made when missing; a record is on disk when `write` returns.

    `store_url` is of the store of the versions, empty when that lasts no longer than the server;
    `store` is its digest, as the URL may hold a secret.
    """

    def __init__(self, path: Path, store_url: str = "") -> None:
        self.store = xxhash.xxh3_64_hexdigest(store_url.encode()) if store_url else ""
        self._path = path
        self._fd = -1
        # Engines end their applies at the same time, each in a thread of its own.
        self._lock = threading.Lock()
        # Whether the file may end in a record that does not count.
        self._torn = False
        self._entries = self._read()
        self._rewrite()

    def newest_first(self) -> Iterator[Entry]:
        return reversed(self._entries)

    def engines(self) -> frozenset[str]:
        """Return the names of the engines that records are of; of an earlier release: empty."""
        named = {name for entry in self._entries for name in (entry.engine, *entry.bases)}
        return frozenset(named - {HOST})

    def answered(self, key: str) -> Entry | None:
        """Return the DONE that answered a key; None: it is new, or was answered long ago."""
        for entry in reversed(self._entries):
            if entry.answer is not None and entry.cause.key == key:
                return entry
        return None

    async def append(self, entry: Entry) -> None:
        """Append a record durably; one that raises DISK_EXHAUSTED does not count."""
        try:
            await asyncio.to_thread(self.write, entry)
        except OSError as error:
            raise WeightSyncError(
                Reason.DISK_EXHAUSTED,
                f"the journal cannot be written ({error.strerror}); free the disk of state_dir",
            ) from error

    async def end(self, entry: Entry, answer: Answer | None, *, in_store: bool) -> None:
        """Append the DONE of what an entry began, whatever the disk says."""
        # What it rejects is rejected by now.
        cause = replace(entry.cause, rejects=0, reason="")
        kept = answer if cause.key else None
        store = self.store if in_store else ""
        done = replace(entry, event="DONE", cause=cause, answer=kept, store=store, gated=False)
        with disk_errors_logged():
            await self.append(done)

    def write(self, entry: Entry) -> None:
        """Append a record durably, blocking for one fsync; after an OSError it does not count."""
        failpoints.hit("journal.write")
        with self._lock:
            if self._torn or os.fstat(self._fd).st_size > _ROTATE_BYTES:
                self._rewrite()
            data, size = _encode(entry), os.fstat(self._fd).st_size
            self._torn = True
            try:
                durable_files.write(self._fd, data)
                durable_files.fsync(self._fd)
            except OSError:
                # A record that was refused must not be found after a crash either.
                with contextlib.suppress(OSError):
                    durable_files.cut(self._fd, size)
                raise
            self._torn = False
            self._entries.append(entry)

    def close(self) -> None:
        os.close(self._fd)

    def _read(self) -> list[Entry]:
        failpoints.hit("journal.read")
        entries: list[Entry] = []
        if self._path.exists():
            for line in self._path.read_bytes().splitlines(keepends=True):
                entry = _decode(line)
                if entry is None:
                    break
                entries.append(entry)
        return entries

    def _counting(self) -> Iterator[Entry]:
        entries = self._entries
        kept: set[int] = set()
        done = [at for at, entry in enumerate(entries) if entry.event == "DONE"]
        room, left = _ROTATE_BYTES // 2, _ANSWERS
        for at in reversed(done):
            if entries[at].answer is not None:
                room, left = room - len(_encode(entries[at])), left - 1
                if room < 0 or left < 0:
                    break
                kept.add(at)
        kept.update(range(len(entries))[-1:])
        newest: dict[tuple[str, bool, bool, bool], int] = {}
        for at, entry in enumerate(entries):
            # What is decided for all engines outlasts what some of them are about to do, and so
            # does a gate.
            which = entry.engine, entry.event == "DONE", bool(entry.bases), entry.gated
            newest.pop(which, None)
            newest[which] = at
        kept.update(list(newest.values())[-2 * _ENGINES :])
        return (entries[at] for at in sorted(kept))

    def _rewrite(self) -> None:
        # Also cuts a torn tail off, so that records written from now on are found again. Until the
        # end the open file may be one that has no name any more.
        self._torn = True
        self._entries = list(self._counting())
        fresh = self._path.with_suffix(".new")
        durable_files.unlink(fresh)
        fd = durable_files.create(fresh)
        try:
            durable_files.write(fd, b"".join(map(_encode, self._entries)))
            durable_files.fsync(fd)
        finally:
            os.close(fd)
        durable_files.rename(fresh, self._path)
        durable_files.flush_directory(self._path.parent)
        before = self._fd
        self._fd = durable_files.append(self._path)
        self._torn = False
        if before >= 0:
            os.close(before)


@contextlib.contextmanager
def disk_errors_logged() -> Iterator[None]:
    """Go on whatever the disk says: the ranks are proved, and asked after a crash."""
    try:
        yield
    except (OSError, WeightSyncError) as error:
        logger.critical(
            "check the disk of the state directory: the live version is not recorded yet (%s); the "
            "engine serves it, and the server writes the record again",
            error,
        )


class Journal:
    """What the journal says of one engine; all engines of this host share `file`."""

    def __init__(self, file: JournalFile, engine: str = "") -> None:
        self.engine = engine
        self._file = file

    def _entries(self) -> Iterator[Entry]:
        return (entry for entry in self._file.newest_first() if entry.counts_for(self.engine))

    @property
    def last(self) -> Entry | None:
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
        """The version decided for all engines together, or by a gate, with none since; else 0."""
        begun: set[int] = set()
        for entry in self._entries():
            if entry.engine == HOST or entry.gated:
                version = entry.meant_for(self.engine)
                # What was begun since may have been to place it.
                return version if begun <= {version} else 0
            if entry.event == "DONE":
                break
            begun.add(entry.version)
        return 0

    @property
    def refused(self) -> int:
        """The version that a gate has not let go yet, with nothing that has ended since; else 0."""
        for entry in self._entries():
            if entry.gated:
                return entry.version if entry.event == "INTENT" else 0
            if entry.event != "INTENT":
                break
        return 0

    @property
    def live_in_store(self) -> int:
        """Live version, if the newest record, no INTENT, has it in the store of today; else 0."""
        last = self.last
        if last is None or not last.store or last.store != self._file.store:
            return 0
        return last.meant_for(self.engine)

    @property
    def named(self) -> frozenset[int]:
        """The versions that an engine may hold: of the last record that ended, and of all since."""
        found: set[int] = set()
        for entry in self._entries():
            found |= {entry.version, entry.meant_for(self.engine)}
            if entry.event == "DONE":
                break
        return frozenset(found - {0})

    def answered(self, key: str) -> Entry | None:
        return self._file.answered(key)

    def says_live(self, version: int) -> bool:
        last = self.last
        return last is not None and (last.event, last.meant_for(self.engine)) == ("DONE", version)

    async def intent(self, plan: CutoverPlan) -> None:
        """Write down what an apply is about to do, before it pauses or writes anything."""
        # Not of its DONE: that ends for one engine what began for one.
        bases = {self.engine: plan.base.record.version} if plan.for_host else {}
        await self._file.append(replace(self._intent(plan), bases=bases))

    async def intent_to_place(self, target: PreparedVersion) -> None:
        """Write down that a version is about to be placed in an engine that stands still."""
        await self._file.append(self._entry("INTENT", target))

    async def commit(self, plan: CutoverPlan) -> None:
        """Decide that an engine goes on with what its gate lets go; it goes back if this raises."""
        await self._file.append(replace(self._intent(plan), event="COMMIT"))

    async def revoke(self, plan: CutoverPlan) -> None:
        """Decide that an engine leaves the target, which it serves, for its base."""
        entry = replace(self._entry("COMMIT", plan.base), apply_id=secrets.token_hex(8))
        await self._file.append(replace(entry, gated=True))

    async def done(self, plan: CutoverPlan, answer: Answer) -> None:
        """Write down that an apply has ended well, and what its caller is answered.

        After the resume, so that no fsync lies in the pause: after a crash in between the ranks
        themselves are asked what they hold. So it raises nothing that the disk says.
        """
        await self._end(self._intent(plan), plan.target, answer)
        with disk_errors_logged():
            await failpoints.reach("apply.done")

    async def restored(self, plan: CutoverPlan, answer: Answer) -> None:
        done = self._entry("DONE", plan.base)
        done = replace(done, apply_id=plan.target.apply_id, cause=plan.cause)
        await self._end(done, plan.base, answer)

    async def finish(self, intent: Entry, current: PreparedVersion, answer: Answer) -> None:
        """Write down that an apply which nobody saw the end of is found done.

        `answer` is for the caller that repeats the call. Every rank holds `current`, the target.
        """
        if intent.bases:
            # Those that were away are to come to it as well.
            intent = replace(intent, engine=HOST, bases={})
        await self._end(intent, current, answer)

    async def found(self, current: PreparedVersion) -> None:
        await self._end(self._entry("DONE", current), current)

    async def _end(
        self, entry: Entry, current: PreparedVersion, answer: Answer | None = None
    ) -> None:
        await self._file.end(entry, answer, in_store=current.record.commit is not None)

    def _entry(self, event: str, current: PreparedVersion) -> Entry:
        version = current.record.version
        before = self.before(version)
        return Entry(event, current.apply_id, version, before, engine=self.engine)

    def before(self, version: int) -> int:
        """Return what to go back to from a version; one that is placed again keeps its way back."""
        live, before = self.live
        return before if version == live else live

    def _intent(self, plan: CutoverPlan) -> Entry:
        target, base = plan.target, plan.base.record.version
        version = target.record.version
        entry = Entry("INTENT", target.apply_id, version, base, plan.cause, engine=self.engine)
        return replace(entry, gated=plan.gated)


def live_in_store(file: JournalFile) -> frozenset[int]:
    """Return the versions that must be in the store of today, as engines served them last."""
    # Where all that was ever done was done for all engines, none is named.
    live = {Journal(file, engine).live_in_store for engine in file.engines() or {""}}
    return frozenset(live - {0})


class HostJournal:
    def __init__(self, file: JournalFile) -> None:
        self._file = file

    async def intent(self, plans: Mapping[str, CutoverPlan]) -> None:
        """Write down what engines are about to do together, by name, before one of them pauses."""
        await self._file.append(_together("INTENT", plans))

    async def commit(self, plans: Mapping[str, CutoverPlan]) -> None:
        """Decide that all go on with the target, whatever happens; all go back if this raises."""
        await self._file.append(replace(_together("COMMIT", plans), bases={}))

    async def place(self, version: int) -> None:
        """Decide that all engines go to a version, prepared or not; not decided if this raises."""
        ended = (one for one in self._file.newest_first() if one.event != "INTENT")
        last = next(ended, None)
        live, before = (last.version, last.previous) if last is not None else (0, 0)
        previous = before if live == version else live
        apply_id = secrets.token_hex(8)
        await self._file.append(Entry("COMMIT", apply_id, version, previous, engine=HOST))

    async def done(self, plans: Mapping[str, CutoverPlan], answer: Answer) -> None:
        record = next(iter(plans.values())).target.record
        done = replace(_together("DONE", plans), bases={})
        await self._file.end(done, answer, in_store=record.commit is not None)
        with disk_errors_logged():
            await failpoints.reach("host.done")

    async def restored(self, plans: Mapping[str, CutoverPlan], answer: Answer) -> None:
        done = _together("DONE", plans)
        previous = Journal(self._file, next(iter(plans))).before(done.previous)
        done = replace(done, version=done.previous, previous=previous)
        bases = [plan.base.record for plan in plans.values()]
        await self._file.end(done, answer, in_store=all(base.commit for base in bases))

    async def found(self, record: VersionRecord, engine: str) -> None:
        """Write down that all shall hold what `engine` and others that are there serve already."""
        previous = Journal(self._file, engine).before(record.version)
        entry = Entry("DONE", "", record.version, previous, engine=HOST)
        await self._file.end(entry, Answer(), in_store=record.commit is not None)


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
