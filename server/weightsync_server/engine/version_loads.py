"""Versions that every rank loads beside generation, where no load plan serves its model.

A load belongs to nobody who waits for it: a caller that gives up leaves a version that is loaded.
What lies in a slot is digested again when every rank has read it, before anything is made of it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from weightsync import clock
from weightsync.backoff import backoff_s
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine.ranks import Ranks
from weightsync_server.engine.refusals import asleep, duration, refused
from weightsync_server.engine.worker_reports import NoPlan, RankLoad
from weightsync_server.ops.metrics import LoaderMetrics
from weightsync_server.ops.tasks import retrieve
from weightsync_server.residency.stager import Stager

logger = logging.getLogger(__name__)

#: How often the ranks' pages are looked at, seconds.
_POLL_S = 0.02
#: How often vLLM itself is looked at meanwhile, seconds.
_LOOK_S = 1.0
#: How long a version may take to be staged for a load, seconds.
_STAGE_S = 600.0
#: From a failed load to the next one, seconds: doubled each time.
_AGAIN_S, _MOST_S = 1.0, 60.0
#: What waits for the ranks to begin a load.
OnStart = Callable[[], Awaitable[None]]
#: A loader that can load is in one of these.
_UP = (pb.LOADER_STATE_READY, pb.LOADER_STATE_PROVING, pb.LOADER_STATE_LOADING)


class LoadFailedError(WeightSyncError):
    """A load has failed, and its rank has told why: what the rank holds is as it was."""


class EngineLiveness(enum.Enum):
    HERE = enum.auto()
    #: It sleeps: its loaders have let go of all that they held.
    ASLEEP = enum.auto()
    LEFT = enum.auto()


@dataclass
class _Load:
    """One load; `ticket` is the ranks' name for it, empty until they are asked."""

    record: VersionRecord
    when_started: OnStart | None
    task: asyncio.Task[None] = field(init=False)
    ticket: str = ""


@dataclass
class _Failures:
    count: int = 0
    error: str = ""
    not_before: float = 0.0


class LoadScheduler:
    """Has the ranks load one version at a time; `no_plan` is why, as a rank puts it."""

    def __init__(
        self,
        ranks: Ranks,
        stager: Stager,
        metrics: LoaderMetrics,
        no_plan: NoPlan,
        look: Callable[[], Awaitable[EngineLiveness]],
    ) -> None:
        self.no_plan = no_plan
        self._look = look
        self._ranks = ranks
        self._stager = stager
        self._metrics = metrics
        self._part()
        #: How often vLLM was seen to sleep.
        self._sleeps = 0
        self._counted_restarts = 0
        self._load: _Load | None = None
        self._last: list[RankLoad] = []
        self._failures = _Failures()
        self._proved = False
        #: Content digest of what was loaded last.
        self._loaded = ""
        #: Of what the model was found not to take.
        self._refused = ""
        #: Of what was live when it was loaded: it lies beside it after an apply.
        self._resident: frozenset[str] = frozenset()

    @property
    def running(self) -> bool:
        return self._load is not None and not self._load.task.done()

    @property
    def version(self) -> int:
        return self._load.record.version if self._load is not None else 0

    def progress(self) -> Sequence[RankLoad]:
        if not self.running or self._load is None or not self._load.ticket:
            return self._last
        now, before = self._ranks.read_loads(self._load.ticket), {x.rank: x for x in self._last}
        # What a rank does not tell before its load has ended is as it was.
        return [_known(load, before.get(load.rank, load)) for load in now]

    @property
    def up(self) -> bool:
        """Whether every rank's loader can load, and none has failed since it last did."""
        loads = self.progress()
        return (
            bool(loads)
            and all(self._state(load) in _UP for load in loads)
            and not self._failures.error
        )

    @property
    def arena_bytes(self) -> int:
        return sum(load.arena_bytes for load in self.progress())

    def status(self) -> dict[str, pb.LoaderStatus]:
        return {load.rank: self._status(load) for load in self.progress()}

    def _status(self, load: RankLoad) -> pb.LoaderStatus:
        return pb.LoaderStatus(
            state=self._state(load),
            version=self.version,
            percent=load.percent,
            arena_bytes=load.arena_bytes,
            restarts=load.restarts,
            last_error=self._failures.error,
            load=duration(load.seconds),
        )

    def _state(self, load: RankLoad) -> pb.LoaderState.ValueType:
        if not self.running:
            return pb.LOADER_STATE_FAILED if self._failures.error else pb.LOADER_STATE_READY
        if load.phase == "starting":
            return pb.LOADER_STATE_STARTING
        return pb.LOADER_STATE_LOADING if self._proved else pb.LOADER_STATE_PROVING

    def resident(self, content_digest: str) -> bool:
        """Tell whether every rank has a version beside its live weights, or live."""
        return content_digest in self._resident

    def close(self) -> None:
        if self._load is not None:
            self._load.task.cancel()

    def forget(self) -> None:
        """Take note that a rank has not got any more what all had loaded."""
        self._loaded, self._resident = "", frozenset()

    def sleep(self) -> None:
        """Take note that vLLM sleeps, with which its loaders have ended."""
        self.forget()
        self._part()
        self._sleeps += 1
        self._last = []

    def _part(self) -> None:
        """Have the loaders that start next meet at another place.

        One of them alone could not be replaced, and where some have met before, others do not.
        """
        self._group = secrets.token_hex(16)

    def begin(self, record: VersionRecord) -> None:
        """Let the ranks load a version soon, unless they do, or need not."""
        if (
            self.wants(record)
            and not self.running
            and clock.monotonic() >= self._failures.not_before
        ):
            self._start(record)

    def wants(self, record: VersionRecord) -> bool:
        """Tell whether a version is none that was loaded last, or refused."""
        return record.content_digest not in (self._loaded, self._refused)

    async def ensure(
        self, record: VersionRecord, timeout_s: float, on_start: OnStart | None = None
    ) -> None:
        """Return when every rank has loaded a version; DEADLINE_EXCEEDED: the load goes on.

        `on_start` is awaited when the ranks have begun, unless they had before this was called.
        """
        if not self.running and self._loaded == record.content_digest:
            return
        deadline = clock.monotonic() + timeout_s
        while self.running and self._load is not None and self._load.record is not record:
            await self._wait(self._load, deadline)
        if self.running and self._load is not None:
            load = self._load
            load.when_started = on_start
        else:
            load = self._start(record, on_start)
        try:
            await self._wait(load, deadline)
        finally:
            # Another one may wait as well.
            if load.when_started is on_start:
                load.when_started = None
        load.task.result()

    async def _wait(self, load: _Load, deadline: float) -> None:
        done, _ = await asyncio.wait({load.task}, timeout=max(0.0, deadline - clock.monotonic()))
        if not done:
            raise self.late()

    def late(self) -> WeightSyncError:
        order = sorted(self.progress(), key=lambda rank: (rank.report is not None, rank.percent))
        where = [f" (rank {x.rank}: {x.phase}, {x.percent} %)" for x in order[:1]]
        return WeightSyncError(
            Reason.DEADLINE_EXCEEDED,
            f"version {self.version} is still being loaded{''.join(where)}; loading continues: "
            "apply again, or raise prepare_timeout",
            retry_after_s=1.0,
        )

    def _start(self, record: VersionRecord, on_start: OnStart | None = None) -> _Load:
        self._load = load = _Load(record, on_start)
        load.task = asyncio.create_task(self._run(load), name=f"load of version {record.version}")
        # Nobody may be there to look at its outcome.
        load.task.add_done_callback(retrieve)
        return load

    async def _run(self, load: _Load) -> None:
        self._loaded, record = "", load.record
        sleeps = self._sleeps
        lease = await self._stager.lease(record, _STAGE_S, for_engine=True, durable=False)
        with lease:
            try:
                load.ticket = await self._started(lease.staged_id)
                if load.when_started is not None:
                    await load.when_started()
                await self._ended(load.ticket)
            except WeightSyncError as error:
                if await self._look() is EngineLiveness.ASLEEP:
                    self.sleep()
                    raise asleep() from error
                self._failed(error)
                if error.reason is Reason.ENGINE_REFUSED:
                    self._refused = record.content_digest
                raise
            if not all(rank.cached for rank in self._last):
                # What they read may have been damaged before they did.
                await self._stager.verify(lease)
        if sleeps != self._sleeps or await self._look() is EngineLiveness.ASLEEP:
            self.sleep()
            raise asleep()
        self._failures, self._proved = _Failures(), True
        self._resident = frozenset.intersection(*(rank.holds for rank in self._last))
        self._loaded = record.content_digest

    async def _started(self, document: str) -> str:
        try:
            return await self._ranks.start_load(self._group, document)
        except WeightSyncError as error:
            if error.reason is not Reason.ENGINE_AWAY:
                raise
            # VLLM may have slept unseen, and with it the group has ended.
            self._part()
            return await self._ranks.start_load(self._group, document)

    async def _ended(self, ticket: str) -> None:
        looked = clock.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            if clock.monotonic() - looked >= _LOOK_S:
                looked = clock.monotonic()
                if await self._look() is EngineLiveness.LEFT:
                    raise WeightSyncError(Reason.ENGINE_AWAY, "vLLM exited during a load")
            loads = self._ranks.read_loads(ticket)
            failed = next((x.report for x in loads if x.report and x.report.phase != "ready"), None)
            if failed is not None:
                raise refused(failed, LoadFailedError)
            if all(load.report is not None for load in loads):
                restarts = sum(load.restarts for load in loads)
                more = max(0, restarts - self._counted_restarts)
                self._metrics.count(max(load.seconds for load in loads), more)
                self._last, self._counted_restarts = loads, restarts
                return

    def _failed(self, error: WeightSyncError) -> None:
        self._part()
        self._failures.count += 1
        self._failures.error, self._resident = error.message, frozenset()
        wait_s = backoff_s(self._failures.count, _AGAIN_S, _MOST_S)
        self._failures.not_before = clock.monotonic() + wait_s
        logger.warning("a version could not be loaded: %s", error.message)


def _known(load: RankLoad, before: RankLoad) -> RankLoad:
    if load.report is not None:
        return load
    return replace(
        load, seconds=before.seconds, arena_bytes=before.arena_bytes, restarts=before.restarts
    )
