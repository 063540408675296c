"""Keeps one engine connected, reconciled and watched, and what its ranks do beside generation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from weightsync import clock
from weightsync.engine import LAYOUT_CHECK, Engine, EngineState
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import about, event
from weightsync.model.manifest import TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.layout_compatibility import add_suggestion
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.version_events import VersionChanged
from weightsync_server.engine.apply_history import SERVER
from weightsync_server.engine.apply_progress import ApplyProgress
from weightsync_server.engine.condition import EngineCondition
from weightsync_server.engine.cutover import Cutover
from weightsync_server.engine.engine_parts import EngineContext
from weightsync_server.engine.journal import Journal
from weightsync_server.engine.live_check import LiveChecks, QuarantinedLeases
from weightsync_server.engine.outcome import PreparedVersion
from weightsync_server.engine.prefetch import Prefetcher
from weightsync_server.engine.reconcile import Reconciler, overruled, write_down
from weightsync_server.engine.refusals import OUT_OF_REACH, asleep, duration
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.version_loads import LoadScheduler
from weightsync_server.ops.os_errors import translate_os_errors, write_fault
from weightsync_server.ops.tasks import cancel_tasks
from weightsync_server.residency.incoming import IncomingReader

logger = logging.getLogger(__name__)


#: How long the disk is left alone after it refused a record, seconds.
_REWRITE_S = 5.0


#: How often the engine is asked how it is, and a failed reconciliation tried again, seconds.
_HEALTH_S = 0.5
_RETRY_S = 5.0
#: Why an engine is away that is dead and does not say why.
_DEAD = "vLLM's engine process has exited; restart vLLM"
#: How often it is begun to prove what an engine generates before that is stopped.
_PROOFS = 3
#: How long a push waits until the engine can be asked about its layout, seconds.
_CHECK_S = 10.0


class EngineSupervisor:
    """Holds the session with one engine; nothing else talks to it while it reconciles.

    `progress` tells of the apply that has the engine.
    """

    def __init__(
        self,
        engine: Engine,
        context: EngineContext,
        journal: Journal,
        on_change: Callable[[], None],
    ) -> None:
        model = context.model
        self.journal = journal
        self.served = model.serving.engine(self.name)
        live, previous = journal.live
        self.served.restore_history(previous, live)
        self.engine = engine
        self._model = model
        self.context = context
        self._shown = context.metrics.engine(self.name)
        self._shown.track_loads(
            lambda: self.loads is not None and self.loads.up,
            lambda: self.loads.arena_bytes if self.loads is not None else 0,
        )
        self._condition = EngineCondition(self._shown, on_change)
        self._wake = asyncio.Event()
        self.checks = LiveChecks(
            self.served, context.metrics, self._shown, self.suspect, self._wake.set
        )
        self.quarantine = QuarantinedLeases()
        self.prefetcher = Prefetcher(self._wake.set)
        model.accepted.asks[self.name] = self.takes
        model.table.events.on(VersionChanged, self._version_changed)
        if context.limits.read_ahead:
            model.events.on(IncomingReader, self.prefetcher.note)
        self._lock = asyncio.Lock()
        self._session: EngineSession | None = None
        self.progress = ApplyProgress(self.name)
        self._task: asyncio.Task[None] | None = None
        self._write_at = 0.0

    def start(self) -> None:
        with about(engine=self.name):
            self._task = asyncio.create_task(self._run(), name="keeper")

    async def stop(self) -> None:
        """The engine goes on with what it serves."""
        # Who waits for a proof waits no longer.
        self._condition.set(pb.ENGINE_STATE_AWAY, "the server stops")
        await cancel_tasks(self._task)
        self._model.table.events.off(VersionChanged, self._version_changed)
        self._model.events.off(IncomingReader, self.prefetcher.note)
        self._model.accepted.asks.pop(self.name, None)
        self._forget()

    async def leave(self) -> None:
        async with self._lock:
            # An apply of it has failed by now, and no rank of it reads anything any more.
            await self.stop()
            self.quarantine.answered()
        self._model.serving.forget(self.name)
        self._model.table.refused.left(self.name)
        self._model.segments.forget_engine(self.name)
        self._shown.remove()
        await self.engine.close()

    async def generates(self) -> bool:
        """Whether the engine generates now, also where nobody can say yet with what."""
        return await self.answers() is EngineState.SERVING

    async def answers(self) -> EngineState | None:
        with contextlib.suppress(WeightSyncError):
            return (await self.engine.health()).state
        return None

    async def fence(self, reason: str) -> None:
        """Have the engine stand still until it is reconciled anew; one that is away may do so.

        When this raises, it generates still.
        """
        try:
            await self.engine.fence(reason)
        except WeightSyncError:
            if await self.generates():
                raise
        self.suspect(reason)

    @property
    def proved(self) -> VersionRecord | None:
        """What every rank is proved to hold, served or not; None: that is not known."""
        live = self._session.live if self._session is not None else None
        return live.record if live is not None else None

    @property
    def loaded(self) -> str:
        """Name or path of what it has loaded, also while it is away; "": it has not told yet."""
        return self._condition.loaded

    @property
    def name(self) -> str:
        return self.journal.engine

    @property
    def serving(self) -> bool:
        return self._condition.serving

    @property
    def capabilities(self) -> frozenset[str]:
        """Nothing while the engine is away."""
        return self._session.info.capabilities if self._session is not None else frozenset()

    @property
    def loads(self) -> LoadScheduler | None:
        return self._session.loads if self._session else None

    def status(self) -> pb.EngineStatus:
        loads, table = self.loads, self._model.table
        status = self._condition.status(self._session.live if self._session else None, loads)
        status.name, status.apply_id = self.name, self.progress.apply_id
        running = self.progress.status(self._session.ranks.pending if self._session else ())
        if running is not None:
            status.running_apply.CopyFrom(running)
        live, back = table.find(self.served.live), table.find(self.served.rollback_to)
        if live is not None:
            status.live_version, status.live_content_digest = live.version, live.content_digest
        if self.served.gate is not None:
            status.gate.CopyFrom(self.served.gate)
        if back is not None:
            status.rollback_version = back.version
            status.rollback_resident = back.residency == pb.RESIDENCY_STAGED and (
                loads is None or loads.resident(back.content_digest)
            )
        return status

    def suspect(self, reason: str) -> None:
        """Ask the ranks again before anything else: nobody knows what they hold."""
        self._condition.set(pb.ENGINE_STATE_FENCED, reason)
        self._wake.set()

    def show_in_place(self, version: int, ranks: Sequence[str]) -> None:
        self.served.set_live(version)
        self._shown.set_served(dict.fromkeys(ranks, version))

    def show(self, current: PreparedVersion, *, whole: bool) -> None:
        self._shown.set_served({r.rank: current.record.version for r in current.reports})
        if whole:
            self.checks.passed(current)
        else:
            self.checks.owe(current)

    def note_gate(self, report: pb.GateReport) -> None:
        """Show what scoring probes on this engine has shown."""
        self.served.gate = report
        self._shown.set_gate(report)

    def cutover(self, session: EngineSession) -> Cutover:
        return Cutover(session, self.journal, self._shown, self.progress)

    async def takes(self, tensors: Sequence[TensorEntry], *, whole: bool = False) -> bool:
        """Ask every rank whether it takes tensors of a push; False: none can be asked now."""
        try:
            # One that never serves, as of another model, has no say in pushes for the others.
            return bool(self._condition.refused) or await self._asked(tensors, whole=whole)
        except WeightSyncError as error:
            raise await add_suggestion(error, tensors, self._model.accepted) from None

    async def _asked(self, tensors: Sequence[TensorEntry], *, whole: bool) -> bool:
        try:
            async with asyncio.timeout(_CHECK_S):
                await self._lock.acquire()
        except TimeoutError:
            return False
        try:
            session = self._session
            if session is None or not self.serving or LAYOUT_CHECK not in session.info.capabilities:
                return False
            return await session.takes(tensors, whole=whole)
        except WeightSyncError as error:
            if error.reason is Reason.ENGINE_REFUSED:
                raise
            logger.warning("the layout of a push is not checked: %s", error.message)
            return False
        finally:
            self._lock.release()

    @contextlib.asynccontextmanager
    async def exclusive(
        self, apply_id: str = "", proof_s: float | None = None, *, only_asks: bool = False
    ) -> AsyncIterator[EngineSession]:
        """Give the session to one caller; nothing else is done with the engine meanwhile.

        `proof_s` is the longest wait for the proof of an engine that generates already; 0 waits as
        long as a prepare may take, None not at all. With `only_asks` the caller changes neither
        what the ranks hold nor whether the engine generates, so its failure says nothing of that.
        """
        # Told at once: a reconciliation may read a whole checkpoint.
        if self._condition.proving and proof_s is not None:
            await self._proved_in_time(proof_s or self.context.limits.prepare_timeout_s)
        if not self.serving:
            raise self._condition.unavailable(_RETRY_S)
        async with self._lock:
            await self.checks.release_ranks()
            self.prefetcher.interrupted()
            session = await self._usable()
            self._condition.set(pb.ENGINE_STATE_APPLYING, "")
            self.progress.begin(apply_id)
            try:
                yield session
            except OSError as error:
                if not only_asks or session.ranks.may_write:
                    self.suspect(
                        "this host failed during an apply; the server asks every rank which "
                        "version it holds"
                    )
                raise write_fault(error, "the apply") from error
            except BaseException as error:
                unknown = self.quarantine.outcome_unknown(session.ranks, error)
                if unknown and (not only_asks or session.ranks.may_write):
                    self.suspect(str(error) or "an apply was interrupted")
                raise
            finally:
                self.progress.end()
                if self._condition.state == pb.ENGINE_STATE_APPLYING:
                    self._condition.set(pb.ENGINE_STATE_SERVING, "")
                    if self.checks.owed or self.prefetcher.wanted:
                        self._wake.set()

    async def _proved_in_time(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self._condition.proving:
                    async with self._lock:
                        # The lock is free for a moment before the state changes.
                        await asyncio.sleep(0)
        except TimeoutError:
            raise (
                self.loads.late() if self.loads else self._condition.unavailable(_RETRY_S)
            ) from None

    async def _usable(self) -> EngineSession:
        session = self._session
        if session is None or self._condition.state != pb.ENGINE_STATE_SERVING:
            raise self._condition.unavailable(_RETRY_S)
        health = await self.engine.health()
        if health.sleeping:
            raise asleep()
        if health.engine_id != session.info.engine_id or health.state is not EngineState.SERVING:
            self._condition.set(
                pb.ENGINE_STATE_RECONCILING, "the engine restarted or changed state"
            )
            self._wake.set()
            raise self._condition.unavailable(_RETRY_S)
        return session

    async def _run(self) -> None:
        while True:
            try:
                async with self._lock:
                    pause = await self._step()
            except WeightSyncError as error:
                pause = self._failed(error)
                if self._condition.refused:
                    with contextlib.suppress(WeightSyncError):
                        await self.engine.fence(error.message)
            except Exception:
                logger.exception("the engine could not be reconciled")
                with contextlib.suppress(WeightSyncError):
                    await self.engine.fence("a fault in the server")
                self._condition.set(pb.ENGINE_STATE_FENCED, "a fault in the server; see its log")
                pause = _RETRY_S
            # Not wait_for: it swallows a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            self._wake.clear()

    async def _step(self) -> float:
        health = await self.engine.health(self._model.table.newest)
        self._condition.note(health)
        if health.state is EngineState.DEAD:
            raise WeightSyncError(Reason.ENGINE_AWAY, health.reason or _DEAD)
        if self._condition.info is None or health.engine_id != self._condition.info.engine_id:
            await self._connect()
        elif self._condition.refused:
            if health.state is not EngineState.FENCED:
                await self.engine.fence(self._condition.refused)
            return _HEALTH_S
        elif self._session is None:
            await self._connect()
        if self._session is not None and self._session.ranks.hung:
            return _HEALTH_S
        if self._condition.state == pb.ENGINE_STATE_SERVING and health.state is EngineState.SERVING:
            # The engines of this host may have gone on together without this one.
            if (proved := self.proved) and overruled(self.journal, self._model.table, proved):
                self.suspect("the fleet decided another version for this host; it is being applied")
                return 0.0
            if self._session is not None:
                await self._use_ranks(self._session, sleeping=health.sleeping)
                await self._write_down(self._session)
            return _HEALTH_S
        await self._reconcile()
        return _HEALTH_S

    async def _use_ranks(self, session: EngineSession, *, sleeping: bool) -> None:
        # Beside a comparison a rank unmaps nothing.
        if self.checks.running:
            return
        if not sleeping:
            await self._occupy(session)
        elif session.loads is not None:
            session.loads.sleep()
        # Retired segments count in the budget until every rank has unmapped them.
        segments = self._model.segments
        retired = segments.retired
        if (retired or not session.tidy) and not self.checks.running:
            existing = segments.exposed_to(self.journal.engine) - retired
            mapped = await session.unmap(existing, self.prefetcher.name)
            if mapped is not None:
                segments.release(retired - mapped, self.journal.engine)

    async def _write_down(self, session: EngineSession) -> None:
        # What the disk refused when it became live is written as soon as the disk takes it.
        live, now = session.live, clock.monotonic()
        if live is None or now < self._write_at:
            return
        if not self.journal.says_live(live.record.version):
            self._write_at = now + _REWRITE_S
            await write_down(self.journal, self._model.serving, live)

    async def _occupy(self, session: EngineSession) -> None:
        if session.loads is not None:
            self._load_newest(session, session.loads)
        if session.live is not None:
            self.checks.repeat(session.live)
        await self.checks.begin(session)
        if self.checks.running:
            self.prefetcher.interrupted()
        else:
            await self.prefetcher.begin(session)

    def _load_newest(self, session: EngineSession, loads: LoadScheduler) -> None:
        """Let the ranks load the version that is likely to be applied next, if it is staged."""
        live = session.live.record if session.live is not None else None
        if live is not None and not loads.progress() and live.residency == pb.RESIDENCY_STAGED:
            # Nothing is known of their loaders, as after a sleep: it takes time to start one.
            loads.begin(live)
            return
        try:
            newest = self._model.table.newest_applicable([self.journal.engine])
        except WeightSyncError:
            return
        after = live is None or newest.order > live.order
        if after and newest.residency == pb.RESIDENCY_STAGED:
            loads.begin(newest)

    def _version_changed(self, event: VersionChanged) -> None:
        """Load a version as soon as it is committed, not at the next look at the engine."""
        record = event.record
        if self.loads is not None and record.commit is not None and self.loads.wants(record):
            self._wake.set()

    async def _connect(self) -> None:
        self._forget()
        info = self.context.serving_time.check(self.name, await self.engine.hello())
        self._condition.info, self._condition.loaded = info, info.model
        self._shown.set_info(info)
        self._model.segments.engines.add(self.name)
        tests = info.vllm_version == "none"
        kind = "the engine for tests" if tests else f"vLLM {info.vllm_version}"
        what = f"{kind}, ranks: {len(info.ranks)}, model {info.model}"
        logger.info("engine %s: connected to %s", self.name, what, extra=event("engine.attached"))
        if info.refusals:
            raise WeightSyncError(Reason.ENGINE_UNSUPPORTED, "; ".join(info.refusals))
        self._session = EngineSession(self.engine, info, self.context)
        # Before it serves: requests may bound how far behind they are answered.
        await self.engine.health(self._model.table.newest)

    async def _reconcile(self) -> None:
        if self._session is None:
            return
        self.checks.forget()
        entry = pb.ApplyRecord(
            kind=pb.APPLY_KIND_RECOVERY,
            requested_by=SERVER,
            cause=self._condition.why_unknown,
            engine=self.name,
            previous_version=self.journal.live[0],
        )
        entry.time.FromNanoseconds(clock.wall_ns())
        began = clock.monotonic()
        self._condition.set(pb.ENGINE_STATE_RECONCILING, "finding out what every rank holds")
        reconciler = Reconciler(
            self._session,
            self.served,
            self.journal,
            self.cutover(self._session),
            self.quarantine,
            self._condition.begin_proof,
            patient=self._condition.proofs < _PROOFS,
        )
        with translate_os_errors("reconciling the engine"):
            current = await reconciler.run()
            # Ranks of older releases remember nobody.
            self.checks.watched = reconciler.watched or bool(self.checks.writers)
            await self._model.accepted.learn(current.record)
            await self._model.table.refused.seen(self.name, reconciler.checkpoint)
        self.show(current, whole=True)
        self._condition.set(pb.ENGINE_STATE_SERVING, "")
        entry.version, entry.content_digest = current.record.version, current.digest
        if reconciler.wrote or entry.version != entry.previous_version:
            entry.result, entry.apply_id = pb.APPLY_RESULT_APPLIED, current.apply_id
            entry.took.CopyFrom(duration(clock.monotonic() - began))
            self.context.history.add(entry)

    def _failed(self, error: WeightSyncError) -> float:
        away = error.reason in OUT_OF_REACH
        if error.message != self._condition.reason:
            named = event("engine.away" if away else "engine.fenced", reason=error.reason.value)
            logger.warning("engine %s: %s", self.name, error.message, extra=named)
        if away:
            self._forget()
        self._condition.fail(error)
        return _HEALTH_S if away or self._condition.refused else _RETRY_S

    def _forget(self) -> None:
        self.checks.forget()
        self.prefetcher.forget()
        if self._session is not None:
            self._session.close()
            # Not before each try to reach one that is away: the others are there.
            self._model.accepted.forget()
        self._model.segments.engines.discard(self.name)
        self._session = None
        self._condition.forget()
