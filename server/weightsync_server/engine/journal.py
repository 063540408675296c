"""The journal of applies: INTENT before the first write to a parameter, DONE after the last.

One JSON object per line with a checksum in front. A torn or damaged tail is ignored; the last good
record tells where the engine was meant to be. A record tells, too, who asked with which key, and a
DONE what was answered, so that a call that is repeated to the next server is not done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import xxhash

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.outcome import Cause
from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightsync_server.engine.outcome import CutoverPlan, PreparedVersion

__all__ = ["Answer", "Entry", "Journal", "disk_errors_logged"]

logger = logging.getLogger(__name__)

#: The file is started anew, with only what still counts, when it has grown to this many bytes.
_ROTATE_BYTES = 1 << 20
#: Answers that it then keeps, the newest; they may fill half of the file.
_ANSWERS = 256


@dataclass(frozen=True)
class Answer:
    """What a call with a key was told at its end.

    Attributes:
        reply: The response, serialised and in base64; empty: the old version was restored.
        refusal: The sentence that said so.
    """

    reply: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Entry:
    """One record.

    Attributes:
        event: `INTENT` or `DONE`.
        apply_id: The attempt, also where it ended with another version than it was made for.
        version: For INTENT where it goes, for DONE what is live.
        previous: The version that was live before; 0: none.
        cause: Why; not given: to heal an engine, or nobody will repeat it.
        answer: For DONE: what a call with a key was told.
        store: For DONE: digest of the URL of the store in which the version is committed; empty: in
            none that lasts.
    """

    event: str
    apply_id: str
    version: int
    previous: int
    cause: Cause = field(default_factory=Cause)
    answer: Answer | None = None
    store: str = ""


def _encode(entry: Entry) -> bytes:
    facts = asdict(entry)
    for name in ("cause", "answer"):
        # Only what says something is written, and most applies say neither.
        facts[name] = {key: value for key, value in (facts[name] or {}).items() if value}
    body = json.dumps(
        {key: value for key, value in facts.items() if value not in ({}, "")}
    ).encode()
    return f"{xxhash.xxh3_64_hexdigest(body)} ".encode() + body + b"\n"


def _decode(line: bytes) -> Entry | None:
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != xxhash.xxh3_64_hexdigest(body).encode():
        return None
    facts: dict[str, Any] = json.loads(body)
    answer = facts.pop("answer", None)
    cause = Cause(**facts.pop("cause", {}))
    return Entry(**facts, cause=cause, answer=Answer(**answer) if answer else None)


def _intent(plan: CutoverPlan) -> Entry:
    target, base = plan.target, plan.base.record.version
    return Entry("INTENT", target.apply_id, target.record.version, base, plan.cause)


@contextlib.contextmanager
def disk_errors_logged() -> Iterator[None]:
    """Go on whatever the disk says: the ranks are proved, and asked after a crash."""
    try:
        yield
    except (OSError, WeightSyncError) as error:
        logger.critical("what is live is not written down yet: %s", error)


class Journal:
    """An append-only file; a record is on disk when `write` returns.

    Args:
        path: The file; made when missing.
        store_url: URL of the store of the versions; empty: it lasts no longer than the server.

    Attributes:
        store: Digest of that URL, which may hold a secret.
    """

    def __init__(self, path: Path, store_url: str = "") -> None:
        self.store = xxhash.xxh3_64_hexdigest(store_url.encode()) if store_url else ""
        self._path = path
        self._fd = -1
        # Whether the file may end in a record that does not count.
        self._torn = False
        self._entries = self._read()
        self._rewrite()

    @property
    def last(self) -> Entry | None:
        """The newest good record."""
        return self._entries[-1] if self._entries else None

    @property
    def live(self) -> tuple[int, int]:
        """Live version and the one before, as of the last DONE; 0: none."""
        for entry in reversed(self._entries):
            if entry.event == "DONE":
                return entry.version, entry.previous
        return 0, 0

    @property
    def live_in_store(self) -> int:
        """Live version, if the newest record says that it is in the store of today; 0: it is not.

        An INTENT says nothing of that.
        """
        last = self.last
        return last.version if last is not None and last.store == self.store != "" else 0

    def says_live(self, version: int) -> bool:
        """Whether the newest record is that this version is live."""
        return self.last is not None and (self.last.event, self.last.version) == ("DONE", version)

    def answered(self, key: str) -> Entry | None:
        """Return the DONE that answered a key; None: it is new, or was answered long ago."""
        for entry in reversed(self._entries):
            if entry.answer is not None and entry.cause.key == key:
                return entry
        return None

    async def intent(self, plan: CutoverPlan) -> None:
        """Write down what an apply is about to do, before it pauses or writes anything.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; the record does not count.
        """
        await self._append(_intent(plan))

    async def intent_to_place(self, target: PreparedVersion) -> None:
        """Write down that a version is about to be placed in an engine that stands still.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; the record does not count.
        """
        await self._append(self._entry("INTENT", target))

    async def done(self, plan: CutoverPlan, answer: Answer) -> None:
        """Write down that an apply has ended well, and what its caller is answered.

        After the resume, so that no fsync lies in the pause: after a crash in between the ranks
        themselves are asked what they hold. For that reason it raises nothing that the disk says.
        """
        with disk_errors_logged():
            await self._end(_intent(plan), plan.target, answer)
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
        store = self.store if current.record.commit is not None else ""
        kept = answer if cause.key else None
        await self._append(replace(entry, event="DONE", cause=cause, answer=kept, store=store))

    def _entry(self, event: str, current: PreparedVersion) -> Entry:
        # A version that is placed again keeps its way back.
        version, (live, before) = current.record.version, self.live
        return Entry(event, current.apply_id, version, before if version == live else live)

    async def _append(self, entry: Entry) -> None:
        try:
            await asyncio.to_thread(self.write, entry)
        except OSError as error:
            raise WeightSyncError(
                Reason.DISK_EXHAUSTED,
                f"the journal cannot be written ({error.strerror}); free the disk of state_dir",
            ) from error

    def write(self, entry: Entry) -> None:
        """Append a record durably. Blocks for one fsync.

        Raises:
            OSError: The disk refused; the record does not count.
        """
        failpoints.hit("journal.write")
        if self._torn or os.fstat(self._fd).st_size > _ROTATE_BYTES:
            self._rewrite()
        data = _encode(entry)
        self._torn = True
        durable_files.write(self._fd, data)
        durable_files.fsync(self._fd)
        self._torn = False
        self._entries.append(entry)

    def close(self) -> None:
        """Close the file."""
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
        """Yield the records that still count, oldest first."""
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
        kept.update(done[-1:], range(len(entries))[-1:])
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
