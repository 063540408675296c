"""The file of the journal: one JSON object per line with a checksum in front.

A torn or damaged tail is ignored; the last good record tells where an engine was meant to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.outcome import Cause
from weightsync_server.ops import durable_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["HOST", "Answer", "Entry", "JournalFile"]

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
        event: `INTENT` or `DONE`; between them, for engines that go together, `COMMIT`.
        apply_id: The attempt, also where it ended with another version than it was made for.
        version: For INTENT and COMMIT where it goes, for DONE what is live.
        previous: The version that was live before; 0: none.
        cause: Why; not given: to heal an engine, or nobody will repeat it.
        answer: For DONE: what a call with a key was told.
        store: For DONE: digest of the URL of the store in which the version is committed; empty: in
            none that lasts.
        engine: Its name; `HOST`: those that go together; empty: the one of an earlier release.
        bases: For `HOST`, before a decision and where all went back: what engines served, by name.
            The record is of no other engine then. For the INTENT of one engine: what that served,
            where its end is one for all engines of this host.
    """

    event: str
    apply_id: str
    version: int
    previous: int
    cause: Cause = field(default_factory=Cause)
    answer: Answer | None = None
    store: str = ""
    engine: str = ""
    bases: dict[str, int] = field(default_factory=dict)

    def counts_for(self, engine: str) -> bool:
        """Tell whether it says something of an engine."""
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


class JournalFile:
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
        # Engines end their applies at the same time, each in a thread of its own.
        self._lock = threading.Lock()
        # Whether the file may end in a record that does not count.
        self._torn = False
        self._entries = self._read()
        self._rewrite()

    def newest_first(self) -> Iterator[Entry]:
        """Yield the good records, newest first."""
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
        """Append a record durably.

        Raises:
            WeightSyncError: DISK_EXHAUSTED; the record does not count.
        """
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
        kept.update(range(len(entries))[-1:])
        newest: dict[tuple[str, bool, bool], int] = {}
        for at, entry in enumerate(entries):
            # What is decided for all engines outlasts what some of them are about to do.
            which = entry.engine, entry.event == "DONE", bool(entry.bases)
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
