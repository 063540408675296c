"""The comparison after an apply that wrote only changes, and leases of what ranks may read.

Such an apply proves in its pause what it wrote. The rest of the live parameters is compared at once
after it, beside generation. What comes meanwhile for the engine ends that comparison, but not for
ever: applies in quick succession are all covered by one comparison within a minute.

A commit that was given up, or whose answer was lost, may go on in the engine. Until every rank has
answered a later call, nothing else may come into the memory that it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from weightsync import clock
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.serving import EngineServing
from weightsync_server.engine.outcome import PreparedVersion
from weightsync_server.engine.ranks import Ranks
from weightsync_server.engine.refusals import OUT_OF_REACH
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.version_loads import LoadFailedError
from weightsync_server.engine.worker_reports import Report
from weightsync_server.ops.metrics import EngineMetrics, Metrics
from weightsync_server.residency.slot import SlotLease

logger = logging.getLogger(__name__)


#: From the first write that was not compared as a whole: a comparison that runs is then waited for.
_PATIENCE_S = 45.0
#: How long it is waited for, and how long it may take when nobody waits, seconds.
_WAIT_S, _LONGEST_S = 60.0, 600.0
#: From one that came to no result to the next, seconds.
_AGAIN_S = 5.0
#: From one to the next while other processes have the memory, seconds.
CHECK_S = 60.0


#: What nobody is known to have done.
_DAMAGED = "live parameters do not match the version; it is being restored"


def _outside(version: int, names: Sequence[str]) -> str:
    return (
        f"an attached trainer wrote {', '.join(names)} outside a transaction; version {version} "
        "is being restored"
    )


class LiveChecks:
    """Compares what every rank holds with the live version, whenever nothing else is to be done.

    Every method that asks the ranks is called by who has the engine for itself. `on_failure` is
    called with a sentence when parameters do not hold the live version.

    Attributes:
        writers: Trainers that can write the live parameters beside applies, or could a moment ago,
            each with what it is told when something was written ("": nothing was).
        owed_times: How often a comparison was asked for: one that had begun by then does not count.
        watched: Whether a process has the memory of a rank, by the ranks' word, or by that of this
            server where ranks of older releases have none; then all is compared again and again.
    """

    def __init__(
        self,
        served: EngineServing,
        metrics: Metrics,
        shown: EngineMetrics,
        on_failure: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self._served = served
        self._metrics = metrics
        self._shown = shown
        self._on_failure = on_failure
        self._on_end = on_end
        self.writers: dict[object, str] = {}
        self.owed_times = 0
        self.watched = False
        # Transactions from their beginning, which may be a long wait, by what ends each: of whom.
        self._writing: dict[Callable[[str], None], object] = {}
        self._watch_at = 0.0
        self._task: asyncio.Task[None] | None = None
        # What was written and not compared as a whole, and since when; None: nothing.
        self._pending: tuple[PreparedVersion, float] | None = None
        self._not_before = 0.0

    @property
    def owed(self) -> bool:
        late = clock.monotonic() >= self._not_before
        return self._pending is not None and late and not self.running

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    @contextlib.contextmanager
    def writing(self, writer: object, break_off: Callable[[str], None]) -> Iterator[None]:
        """Have `break_off` called with the reason why a writer's transaction must not go on."""
        self._writing[break_off] = writer
        try:
            yield
        finally:
            del self._writing[break_off]

    def break_off(self, why: str, writer: object | None = None) -> None:
        """Have no transaction wait for its trainer any more; those of `writer` alone if given."""
        for end, who in list(self._writing.items()):
            if writer in (None, who):
                end(why)

    def repeat(self, current: PreparedVersion) -> None:
        if self.watched and self._pending is None and clock.monotonic() >= self._watch_at:
            self.owe(current)

    def passed(self, current: PreparedVersion) -> None:
        """Take note that every parameter of every rank was compared and holds a version."""
        self._pending = None
        self._watch_at = clock.monotonic() + CHECK_S
        self._served.set_live_check(current.record.version, pb.LIVE_CHECK_PASSED)
        self._shown.set_live_checked()

    def owe(self, current: PreparedVersion) -> None:
        """Take note that only what was written was compared; `begin` owes the rest."""
        since = self._pending[1] if self._pending else clock.monotonic()
        self._pending = current, since
        self.owed_times += 1
        self._not_before = 0.0
        self._served.set_live_check(current.record.version, pb.LIVE_CHECK_PENDING)

    async def begin(self, session: EngineSession) -> None:
        """Let the ranks compare, if that is owed; returns as soon as they have begun."""
        current = self._pending[0] if self._pending else None
        if current is None or current is not session.live or not self.owed:
            return
        try:
            ticket = await session.ranks.start_check(current.apply_id)
        except WeightSyncError as error:
            self._put_off(error.message)
            return
        watch = self._watch(session, current, ticket, self.owed_times)
        self._task = asyncio.create_task(watch, name="live check")
        self._task.add_done_callback(lambda _: self._on_end())

    async def release_ranks(self) -> None:
        """Let the caller have the ranks: end a comparison, or wait for one that is overdue."""
        if not self.running or self._task is None or self._pending is None:
            return
        if clock.monotonic() - self._pending[1] >= _PATIENCE_S:
            await asyncio.wait({self._task}, timeout=_WAIT_S)
        self.stop()

    def stop(self) -> None:
        """End a comparison; the ranks notice it when they are asked for something else."""
        if self._task is not None and self._task.cancel():
            self._metrics.count_live_check("cancelled")
        self._task = None

    def forget(self) -> None:
        """Take note that nobody knows what the ranks hold: a reconciliation compares it."""
        self.stop()
        self._pending = None

    async def _watch(
        self, session: EngineSession, current: PreparedVersion, ticket: str, owed_times: int
    ) -> None:
        try:
            reports = await session.ranks.reports("a comparison", ticket, _LONGEST_S)
        except WeightSyncError as error:
            self._put_off(error.message)
            return
        answers = {report.proved for report in reports}
        if None in answers and False not in answers:
            self._put_off("; ".join(report.error for report in reports if report.error))
            return
        self._metrics.count_live_check("failed" if False in answers else "passed")
        self.judge(current, reports, owed_times)

    def judge(self, current: PreparedVersion, reports: Sequence[Report], owed_times: int) -> None:
        """Take note of what ranks found that compared all their parameters with the live version.

        `owed_times` is the count when they were asked: what was written since may lie where they
        had already looked.
        """
        silent = [report for report in reports if report.holders is None]
        # Of a rank that tells none, as of older releases, only this server knows; and one that
        # came to no end has said nothing of who has its memory.
        known = bool(self.writers) or (
            self.watched and any(report.proved is None for report in silent)
        )
        self.watched = any(report.holders for report in reports) or (bool(silent) and known)
        if any(report.proved is False for report in reports):
            names = sorted({name for report in reports for name in report.mismatched})
            self._fail(current.record.version, names)
        elif all(report.proved for report in reports) and owed_times == self.owed_times:
            self.passed(current)

    def _fail(self, version: int, names: Sequence[str]) -> None:
        written = self.writers or self.watched
        said = _outside(version, names) if written else _DAMAGED
        logger.critical("version %d: %s (%s)", version, said, ", ".join(names))
        self._pending = None
        self._served.set_live_check(version, pb.LIVE_CHECK_FAILED)
        self._metrics.violate("never_mixed")
        self.writers = dict.fromkeys(self.writers, said)
        self._on_failure(said)

    def _put_off(self, reason: str) -> None:
        logger.warning("the comparison of all live parameters was put off: %s", reason)
        self._metrics.count_live_check("cancelled")
        self._not_before = clock.monotonic() + _AGAIN_S


#: After these nobody knows what the ranks do or hold, or whether the engine generates.
_UNSURE = OUT_OF_REACH | {Reason.ENGINE_FENCED, Reason.FAULT}


class QuarantinedLeases:
    def __init__(self) -> None:
        self._leases: list[SlotLease] = []

    @staticmethod
    def outcome_unknown(ranks: Ranks, error: BaseException) -> bool:
        """Return whether nobody knows what the ranks do, after a call that failed so."""
        loading = isinstance(error, LoadFailedError)
        known = loading or (isinstance(error, WeightSyncError) and error.reason not in _UNSURE)
        return not known or ranks.may_write

    def release(self, lease: SlotLease, ranks: Ranks, error: BaseException) -> None:
        """Release a lease of what was not made live: at once, or after the ranks' next answer."""
        if self.outcome_unknown(ranks, error):
            self._leases.append(lease)
        else:
            lease.release()

    def answered(self) -> None:
        """Take note that every rank has answered a call, and so is done with those before."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()
