"""The last applies of this host's engines, however they ended, also of servers before this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine import replies
from weightsync_server.engine.refusals import GateRefusedError, duration
from weightsync_server.ops import durable_files, traces
from weightsync_server.ops.tasks import in_thread, start_task

logger = logging.getLogger(__name__)

#: Who asks where the server acts by itself.
SERVER = "server"
#: How many are remembered where no setting says so.
DEFAULT_LIMIT = 1000
#: Bytes of one record, and characters of a sentence in it.
_MAX_RECORD, _MAX_SENTENCE = 16 << 10, 2000
#: No server records so many.
_MAX_NUMBER = 1 << 53
#: Metadata of errors of applies that had begun.
_BEGUN = frozenset({"apply_id", "fleet_apply"})
#: What changes nothing, and is merged when a caller repeats it.
_NOTHING_DONE = frozenset(
    {pb.APPLY_RESULT_ALREADY_LIVE, pb.APPLY_RESULT_PLANNED, pb.APPLY_RESULT_REFUSED}
)
_RESULTS = {
    pb.APPLY_OUTCOME_APPLIED: pb.APPLY_RESULT_APPLIED,
    pb.APPLY_OUTCOME_ALREADY_LIVE: pb.APPLY_RESULT_ALREADY_LIVE,
    pb.APPLY_OUTCOME_PLANNED: pb.APPLY_RESULT_PLANNED,
}


class ApplyHistory:
    """Remembers at most `limit` applies, the oldest of which go first.

    They are kept in a file from `open` on, one JSON object a line, written after the apply and
    beside everything else: a disk that is full or slow fails and delays no apply. What it refused
    is written with the next record. Used on the event loop only. `spans` makes a span of each apply
    that is `recorded`; None: nobody traces them.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT, spans: traces.SpanMaker | None = None) -> None:
        self._limit, self._spans = limit, spans
        self._path: Path | None = None
        self._records: dict[int, pb.ApplyRecord] = {}
        self._unwritten: list[pb.ApplyRecord] = []
        self._writing: asyncio.Task[None] | None = None
        #: Lines in the file; None: it is to be written anew, for it may end in half a line.
        self._lines: int | None = None
        self._refused = False

    async def open(self, path: Path) -> None:
        """Read the records at `path` and write new ones there; damaged lines are left out."""
        self._path = path
        try:
            found, self._lines = await in_thread(_read, path, self._limit)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning(
                "%s cannot be read, so the history of applies starts empty: %s", path, error
            )
            return
        if self._lines is None:
            logger.warning("%s has damaged lines, which the history skips", path)
        self._records = found

    async def close(self) -> None:
        """Return when all is written, or was refused by the disk."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    def newest_first(self) -> Iterator[pb.ApplyRecord]:
        return reversed(self._records.values())

    def begin_work(self, kind: pb.ApplyKind.ValueType) -> traces.Work | None:
        """Return what is traced of an apply that begins now; None: nobody traces it."""
        if self._spans is None:
            return None
        return traces.Work(self._spans, _kind(kind), traces.caller())

    @contextlib.contextmanager
    def recorded(self, entry: pb.ApplyRecord, work: traces.Work | None = None) -> Iterator[None]:
        """Remember an apply at the end of the block, which fills in what it did.

        What the block raises is how the apply ended. `work` is what was traced of it before.
        """
        entry.time.FromNanoseconds(clock.wall_ns())
        began = time.perf_counter()
        work = work or self.begin_work(entry.kind)
        try:
            with traces.within(work):
                yield
        except WeightSyncError as error:
            note_failure(entry, error)
            raise
        except BaseException as error:
            entry.result = pb.APPLY_RESULT_INTERRUPTED
            entry.reason = _sentence(f"it was interrupted ({str(error) or type(error).__name__})")
            raise
        finally:
            entry.took.CopyFrom(duration(time.perf_counter() - began))
            self.add(entry)
            if work is not None and entry.result == pb.APPLY_RESULT_ALREADY_LIVE:
                # A controller may ask for what is live again and again.
                work.drop()
            elif work is not None:
                work.end(_traced_facts(entry), entry.reason)

    def add(self, entry: pb.ApplyRecord) -> None:
        """Remember a copy of the record of an apply that has ended."""
        kept = _bounded(entry)
        last = next(self.newest_first(), None)
        kept.times = 1
        kept.number = last.number + 1 if last is not None else 1
        if last is not None and _repeats(kept, last):
            kept.number, kept.times = last.number, last.times + 1
        self._records[kept.number] = kept
        self._forget()
        if self._path is None:
            return
        self._unwritten.append(kept)
        if self._writing is None or self._writing.done():
            self._writing = start_task(self._write(self._path))

    def _forget(self) -> None:
        while len(self._records) > self._limit:
            del self._records[next(iter(self._records))]

    async def _write(self, path: Path) -> None:
        while self._unwritten:
            records, self._unwritten = self._unwritten, []
            lines, self._lines = self._lines, None
            try:
                if lines is None or lines + len(records) > 2 * self._limit:
                    records = list(self._records.values())
                    self._unwritten, lines = [], 0
                    await in_thread(_rewrite, path, records)
                else:
                    await in_thread(_append, path, records)
            except OSError as error:
                if not self._refused:
                    logger.warning(
                        "the history of applies is not written to %s (%s); applies go on, and it "
                        "is written again with the next apply",
                        path,
                        error.strerror or error,
                    )
                self._refused = True
                return
            self._lines, self._refused = lines + len(records), False


def concern(record: VersionRecord) -> None:
    """Have the apply of this task be in the trace of a version, if it is traced."""
    if (work := traces.current()) is not None:
        work.concern(record.traceparent)


def note_failure(entry: pb.ApplyRecord, error: WeightSyncError) -> None:
    """Fill in a record how an apply has failed: it was refused, unless the error is of one begun.

    A result that is known already stays.
    """
    if not entry.result:
        entry.result = _failure(error)
    entry.reason, entry.error_reason = _sentence(error.message), error.reason.value
    entry.apply_id = entry.apply_id or error.metadata.get("apply_id", "")
    if isinstance(error, GateRefusedError):
        entry.gate.CopyFrom(error.report)


def _failure(error: WeightSyncError) -> pb.ApplyResult.ValueType:
    if error.reason is Reason.APPLY_RESTORED:
        return pb.APPLY_RESULT_RESTORED
    if _BEGUN.isdisjoint(error.metadata):
        return pb.APPLY_RESULT_REFUSED
    fenced = error.reason is Reason.ENGINE_FENCED
    return pb.APPLY_RESULT_FENCED if fenced else pb.APPLY_RESULT_INTERRUPTED


def note_reports(
    entry: pb.ApplyRecord, reports: Mapping[str, pb.ApplyReport], absent: Mapping[str, str]
) -> None:
    """Fill in a record what engines have done, by name; `absent` says why others took no part."""
    every = replies.engine_reports(reports, absent)
    note_reply(entry, replies.combined(reports), every)


def note_reply(
    entry: pb.ApplyRecord, report: pb.ApplyReport, engines: list[pb.EngineReport]
) -> None:
    """Fill in a record what an apply has done: the report of all, and that of each engine."""
    entry.result = _RESULTS[report.outcome]
    entry.apply_id, entry.version = report.apply_id, report.version
    entry.previous_version = report.previous_version
    entry.engines.extend(engines)
    if report.HasField("gate"):
        entry.gate.CopyFrom(report.gate)
    if entry.result != pb.APPLY_RESULT_APPLIED:
        return
    entry.content_digest = report.content_digest
    entry.written_bytes, entry.strategy = report.written_bytes, report.strategy
    entry.phases.CopyFrom(report.phases)
    entry.pause.CopyFrom(report.pause)
    ranks = [(one.engine, rank) for one in engines for rank in one.report.ranks]
    if ranks:
        engine, rank = max(ranks, key=lambda one: _written_ns(one[1]))
        slowest = pb.SlowestRank(
            engine=engine, rank=rank.rank, commit=rank.commit, verify=rank.verify
        )
        entry.slowest.CopyFrom(slowest)


def _sentence(text: str) -> str:
    # A path may hold bytes that are no text, which no message can carry.
    return text.encode(errors="replace").decode()[:_MAX_SENTENCE]


def _written_ns(rank: pb.RankResult) -> int:
    return rank.commit.ToNanoseconds() + rank.verify.ToNanoseconds()


def _bounded(entry: pb.ApplyRecord) -> pb.ApplyRecord:
    kept = pb.ApplyRecord()
    kept.CopyFrom(entry)
    if kept.ByteSize() > _MAX_RECORD:
        for engine in kept.engines:
            del engine.report.ranks[:]
    if kept.ByteSize() > _MAX_RECORD:
        del kept.engines[:]
    return kept


def _kind(kind: pb.ApplyKind.ValueType) -> str:
    return pb.ApplyKind.Name(kind).removeprefix("APPLY_KIND_").lower()


def _traced_facts(entry: pb.ApplyRecord) -> dict[str, str | int | None]:
    """Return what the span of an apply says beside its phases."""
    strategy = pb.ApplyStrategy.Name(entry.strategy).removeprefix("APPLY_STRATEGY_").lower()
    return {
        "version": entry.version,
        "previous_version": entry.previous_version or None,
        "apply_id": entry.apply_id,
        "fleet_apply": entry.fleet_apply or None,
        "result": pb.ApplyResult.Name(entry.result).removeprefix("APPLY_RESULT_").lower(),
        "error_reason": entry.error_reason,
        "requested_by": entry.requested_by,
        "engine": entry.engine,
        "strategy": strategy if entry.strategy else "",
        "written_bytes": entry.written_bytes or None,
    }


def _repeats(entry: pb.ApplyRecord, last: pb.ApplyRecord) -> bool:
    """Return whether a caller was answered what it was answered just before, without any change."""
    return entry.result in _NOTHING_DONE and _answer(entry) == _answer(last)


def _answer(entry: pb.ApplyRecord) -> tuple[object, ...]:
    whose = entry.kind, entry.requested_by, entry.engine
    return *whose, entry.version, entry.result, entry.reason


def _read(path: Path, limit: int) -> tuple[dict[int, pb.ApplyRecord], int | None]:
    """Return the last records by number, and how many lines there are; None: some are damaged."""
    found: dict[int, pb.ApplyRecord] = {}
    lines, whole = path.read_bytes().splitlines(keepends=True), True
    # From the end, for a line takes half a millisecond, and older ones do not count.
    for line in reversed(lines):
        if len(found) == limit:
            break
        entry = _decode(line)
        if entry is None:
            whole = False
        else:
            # One that repeats the last has its number, and counts in its place.
            found.setdefault(entry.number, entry)
    return dict(sorted(found.items())), len(lines) if whole else None


def _decode(line: bytes) -> pb.ApplyRecord | None:
    try:
        entry = Parse(line, pb.ApplyRecord(), ignore_unknown_fields=True)
    except (ParseError, ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and 0 < entry.number < _MAX_NUMBER
    return entry if whole else None


def _encode(records: list[pb.ApplyRecord]) -> bytes:
    lines = (MessageToJson(one, preserving_proto_field_name=True, indent=None) for one in records)
    return "".join(f"{line}\n" for line in lines).encode()


def _append(path: Path, records: list[pb.ApplyRecord]) -> None:
    # Not flushed to the disk: a record is lost only if the host loses its power.
    fd = durable_files.append(path)
    try:
        durable_files.write(fd, _encode(records))
    finally:
        os.close(fd)


def _rewrite(path: Path, records: list[pb.ApplyRecord]) -> None:
    fresh = path.with_suffix(".new")
    durable_files.unlink(fresh)
    fd = durable_files.create(fresh)
    try:
        durable_files.write(fd, _encode(records))
        durable_files.fsync(fd)
    finally:
        os.close(fd)
    durable_files.rename(fresh, path)
