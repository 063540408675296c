"""Finding out what an engine holds, and making it hold one whole, verified version.

Done after every start of the server or of the engine, and after a fence. The ranks are asked first;
only when they do not hold one known version is anything written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from weightsync import failpoints
from weightsync.engine import CacheUse, EngineState, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.shm.segment_socket import OfferedFile
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.serving import EngineServing, ServingState
from weightsync_server.catalog.table import VersionTable
from weightsync_server.engine import idempotency
from weightsync_server.engine.block_writers import still_writing, wait_let_go
from weightsync_server.engine.cutover import Cutover
from weightsync_server.engine.file_offers import offered
from weightsync_server.engine.journal import HOST, Entry, Journal
from weightsync_server.engine.live_check import QuarantinedLeases
from weightsync_server.engine.outcome import PreparedVersion, reject
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.worker_reports import RankState
from weightsync_server.ops.os_errors import translate_os_errors
from weightsync_server.residency.slot import SlotLease

logger = logging.getLogger(__name__)


def overruled(journal: Journal, table: VersionTable, proved: VersionRecord) -> bool:
    """Tell whether other content than an engine holds was decided for all engines of this host.

    Or that no gate has let it go yet, so that the one before it counts.
    """
    decided = table.find(journal.decided)
    if decided is None:
        # What was live before is not there any more; that makes the other no better.
        refused = table.find(journal.refused)
        return refused is not None and refused.content_digest == proved.content_digest
    return decided.content_digest != proved.content_digest


def _unfinished(journal: Journal, current: PreparedVersion) -> Entry | None:
    """Return the apply that nobody saw the end of, if it made every rank hold this.

    One of several engines together counts only if it was decided.
    """
    last = journal.last
    if last is None or last.version != current.record.version:
        return None
    decided = last.engine == HOST or last.gated
    return last if last.event == ("COMMIT" if decided else "INTENT") else None


async def write_down(journal: Journal, serving: ServingState, current: PreparedVersion) -> None:
    """Write down what every rank holds, when that is not what the journal says already.

    A caller that asked for `current` and has no answer yet gets one when it repeats its call.
    """
    intent = _unfinished(journal, current)
    if intent is not None:
        # A rollback that went on to its end without a server, or without its caller.
        left, reason = intent.cause.rejects, intent.cause.reason
        rejected = bool(left) and await reject(serving, left, reason)
        answer = idempotency.pack_recovered(intent, current, rejected=rejected)
        await journal.finish(intent, current, answer)
    elif not journal.says_live(current.record.version):
        await journal.found(current)


#: What no next attempt changes, or nobody understands.
_LASTING = (Reason.ENGINE_UNSUPPORTED, Reason.FAULT)
#: Time to read a checkpoint or a stored version into a slot, seconds.
_LOAD_S = 600.0


class Reconciler:
    """Brings one engine to one verified version.

    The ranks may still read what is in `quarantine`. `on_proving` is called when the engine
    generates before what it holds is proved; with `patient` it goes on generating when that cannot
    be proved now. `joining` of the session's context is taken before the engine serves; an apply of
    all engines holds it to its end.

    Attributes:
        wrote: Whether a version was written into the engine.
        watched: Whether a process has the memory of a rank, by the ranks' word, or may have that of
            one which did not say.
        checkpoint: Signature of the tensors of the engine's own checkpoint, which is read whenever
            the engine has started anew; empty: it was not read.
    """

    def __init__(
        self,
        session: EngineSession,
        served: EngineServing,
        journal: Journal,
        cutover: Cutover,
        quarantine: QuarantinedLeases,
        on_proving: Callable[[], None],
        *,
        patient: bool,
    ) -> None:
        self._session, self._context = session, session.context
        self._model, self._joining = session.context.model, session.context.joining
        self._served = served
        self._journal = journal
        self._cutover = cutover
        self._quarantine = quarantine
        self._on_proving = on_proving
        self._patient = patient
        self._proving = False
        self.wrote = False
        self.watched = False
        self.checkpoint = ""

    async def run(self) -> PreparedVersion:
        """Return what every rank is proved to hold; the engine generates on it.

        ENGINE_UNSUPPORTED: it stands still for good. Any other: it stands still, with the reason,
        or cannot be asked now.
        """
        await failpoints.reach("apply.reconcile")
        health = await self._session.engine.health()
        if health.state is EngineState.PAUSED:
            # A lease that nobody holds any more: an apply ended without knowing how.
            await self._session.engine.fence("the server asks every rank what it holds")
        # A rank may be at work for a server that died, and would refuse the prepare.
        await self._session.release_prepared()
        states = await self._session.states()
        self._quarantine.answered()
        _check_answers(states)
        await self._let_go(states)
        known = self._known_version(states)
        if known is not None and not overruled(self._journal, self._model.table, known):
            self._count_unexpected(known)
            current = await self._prepare(known, compare_live=True)
            if _proved(current):
                return await self._go_on(current)
            current.lease.release()
            if health.state is EngineState.SERVING:
                # Measured in the live parameters: every rank claims what it does not hold.
                self._context.metrics.violate("never_mixed")
        try:
            with translate_os_errors("restoring a version"):
                return await self._place(states)
        except WeightSyncError as error:
            if not (self._proving and self._patient) or error.reason in _LASTING:
                # Else the pause would run out, and the next attempt pause again.
                with contextlib.suppress(WeightSyncError):
                    await self._session.engine.fence(error.message)
            raise

    async def _let_go(self, states: Sequence[RankState]) -> None:
        """Refuse to place or prove what a trainer can still write, in a block that nobody ends."""
        # Who does not answer may say it later: the next comparison asks again.
        self.watched = any(state.holders or not state.answered for state in states)
        if not still_writing(states):
            return
        await self._session.engine.fence(still_writing(states))
        if why := await wait_let_go(self._session):
            raise WeightSyncError(Reason.ENGINE_FENCED, why)

    def _known_version(self, states: Sequence[RankState]) -> VersionRecord | None:
        contents = {"" if state.dirty else state.content_digest for state in states}
        if len(contents) != 1 or contents == {""}:
            return None
        (content,) = contents
        matching = {r.version: r for r in self._model.table.list() if r.content_digest == content}
        last = self._journal.last
        likely = (self._wanted(), last.version if last else 0, *matching)
        return next((matching[version] for version in likely if version in matching), None)

    def _count_unexpected(self, known: VersionRecord) -> None:
        """Count what a first look must not find: nothing is written without a word before it."""
        last = self._journal.last
        if self._served.live or last is None:
            return
        versions = {self._journal.live[0], *self._journal.named}
        named = [self._model.table.find(version) for version in versions]
        digests = {record.content_digest for record in named if record is not None}
        if None not in named and known.content_digest not in digests:
            logger.critical(
                "invariant crash_safe is violated: every rank holds version %d, which is not in "
                "the journal",
                known.version,
            )
            self._context.metrics.violate("crash_safe")

    def _wanted(self) -> int:
        return self._journal.decided or self._served.live or self._journal.live[0]

    @contextlib.asynccontextmanager
    async def _joined(self, current: PreparedVersion) -> AsyncIterator[None]:
        """Let the engine serve in the body: what it is to serve does not change meanwhile."""
        # Who decides meanwhile sees what it holds.
        await self._session.hold(current)
        async with self._joining:
            if overruled(self._journal, self._model.table, current.record):
                raise WeightSyncError(
                    Reason.ENGINE_AWAY,
                    "the engines of this host serve a newer version; this engine gets it now",
                )
            yield
        version = current.record.version
        named = event("engine.serving", version=version)
        logger.info("engine %s serves version %d", self._served.name, version, extra=named)

    async def _prepare(self, record: VersionRecord, *, compare_live: bool) -> PreparedVersion:
        lease = await self._model.stager.stage(record.version, _LOAD_S)
        try:
            return await self._ask(lease, compare_live=compare_live)
        except BaseException:
            lease.release()
            raise

    async def _ask(
        self, lease: SlotLease, *, compare_live: bool, proof_only: bool = False
    ) -> PreparedVersion:
        try:
            return await self._session.prepare(
                lease,
                compare_live=compare_live,
                proof_only=proof_only,
                timeout_s=self._context.limits.prepare_timeout_s,
            )
        except WeightSyncError as error:
            if error.reason is Reason.ENGINE_REFUSED:
                # The model cannot take these tensors, however often it is asked.
                loads = self._session.loads
                why = str(loads.no_plan) if loads is not None else ""
                text = (
                    f"{error.message}; it has no load plan, because {why}" if why else error.message
                )
                raise WeightSyncError(Reason.ENGINE_UNSUPPORTED, text) from error
            raise

    async def _go_on(self, current: PreparedVersion) -> PreparedVersion:
        async with self._joined(current):
            await self._record(current)
            health = await self._session.engine.health()
            if health.state is not EngineState.SERVING or health.reason:
                await self._label(current)
        return current

    async def _place(self, states: Sequence[RankState]) -> PreparedVersion:
        if not _written(states) and not self._has_candidate():
            async with self._model.adoption.turn:
                # Another engine may have been the first meanwhile.
                if not self._has_candidate():
                    return await self._begin()
        async with contextlib.AsyncExitStack() as stack:
            await self._stand_still(stack)
            current = await self._last_good(fresh=not _written(states))
            if current is None:
                current = await self._checkpoint(states)
            async with self._joined(current):
                # Not before: its INTENT would come after what was decided meanwhile.
                if not _proved(current):
                    await self._clear_caches(stack)
                    await self._write(current)
                await self._record(current)
                await self._session.resume(current)
        return current

    async def _clear_caches(self, stack: contextlib.AsyncExitStack) -> None:
        """Have a fenced engine forget what it computed by the weights that are overwritten.

        A fence keeps requests and caches, for it writes nothing; so does a lease that ran out.
        """
        health = await self._session.engine.health()
        if health.state is EngineState.FENCED:
            # Ends the lease of a server that died as it did this; nobody else is let in by it.
            await self._session.engine.fence(health.reason)
            await stack.enter_async_context(self._session.paused(PauseSpec()))

    async def _write(self, current: PreparedVersion) -> None:
        try:
            await self._cutover.place(current)
            self.wrote = True
        except BaseException as error:
            self._quarantine.release(current.lease, self._session.ranks, error)
            raise

    def _has_candidate(self) -> bool:
        return any(map(self._model.table.committed, self._candidates()))

    def _candidates(self) -> tuple[int, int]:
        return self._wanted(), self._served.rollback_to

    async def _begin(self) -> PreparedVersion:
        """Adopt what an engine started with; where that takes a load, it generates meanwhile."""
        with self._session.awaiting_loads(self._serve_unproved):
            current = await self._as_loaded(await self._adopt())
        async with self._joined(current):
            await self._record(current)
            await self._label(current)
        return current

    async def _label(self, current: PreparedVersion) -> None:
        """Resume on a version, also where the engine generates with it and does not know that."""
        async with contextlib.AsyncExitStack() as stack:
            await self._stand_still(stack, PauseSpec(cache=CacheUse.KEEP))
            await self._session.resume(current)

    async def _serve_unproved(self) -> None:
        """Let an engine generate with what vLLM itself has loaded, while a load of it is made."""
        if self._proving or self._joining.locked():
            return
        health = await self._session.engine.health()
        try:
            if health.state is not EngineState.SERVING:
                await self._session.resume(None)
        except WeightSyncError as error:
            logger.warning(
                "the engine does not generate until its weights are verified: %s", error.message
            )
            return
        logger.info(
            "the engine generates with the weights that vLLM loaded while they are verified"
        )
        self._proving = True
        self._on_proving()

    async def _last_good(self, *, fresh: bool) -> PreparedVersion | None:
        """Prepare what was live, else what was live before it; None: neither can be had.

        If the engine holds what it started with (`fresh`), its load plan is proved first, as what a
        wrong plan writes is also compared by that plan.
        """
        for version in self._candidates():
            record = self._model.table.committed(version)
            if record is None:
                continue
            if fresh and not self._session.plan_proved:
                await self._prove_plan()
            try:
                return await self._prepare(record, compare_live=False)
            except WeightSyncError as error:
                if error.reason is not Reason.DATA_CORRUPT:
                    raise
                logger.critical("version %d is lost: %s", version, error.message)
        return None

    async def _checkpoint(self, states: Sequence[RankState]) -> PreparedVersion:
        """Prepare the engine's own checkpoint, for nothing else can be had."""
        checkpoint = await self._adopt()
        # What an adoption that broke off has proved is what the rank started with.
        if _written(states, checkpoint.content_digest):
            # Another version lies there, so that it says nothing of what vLLM computes.
            return await self._prepare(checkpoint, compare_live=True)
        return await self._as_loaded(checkpoint)

    async def _as_loaded(self, checkpoint: VersionRecord) -> PreparedVersion:
        """Compare the live parameters with the engine's own checkpoint, as its versions are made.

        Where what the loaders copied is not what is live, vLLM has computed something of it.
        """
        current = await self._prepare(checkpoint, compare_live=True)
        if not _proved(current) and self._session.load_versions(_names(current)):
            current.lease.release()
            current = await self._prepare(checkpoint, compare_live=True)
        try:
            self._check_plan(current)
        except BaseException as error:
            self._quarantine.release(current.lease, self._session.ranks, error)
            raise
        return current

    async def _prove_plan(self) -> None:
        """Compare the live parameters with the engine's own checkpoint; nothing is kept of that."""
        async with (
            self._offered() as files,
            self._model.adoption.borrow(files) as lease,
        ):
            await self._note_checkpoint(lease.record)
            current = await self._ask(lease, compare_live=True, proof_only=True)
            if not _proved(current) and self._session.load_versions(_names(current)):
                current = await self._ask(lease, compare_live=True, proof_only=True)
            await self._session.release_prepared()
        self._check_plan(current)

    def _check_plan(self, current: PreparedVersion) -> None:
        if not _proved(current):
            raise _not_copies(current)
        self._session.plan_proved = True
        what = "a second load" if current.shadow else "the load plan"
        logger.info("%s is proved against the engine's checkpoint", what)

    async def _stand_still(
        self, stack: contextlib.AsyncExitStack, spec: PauseSpec | None = None
    ) -> None:
        health = await self._session.engine.health()
        if health.state is EngineState.SERVING:
            await stack.enter_async_context(self._session.paused(spec or PauseSpec()))

    async def _adopt(self) -> VersionRecord:
        async with self._offered() as files:
            logger.info("reading the engine's checkpoint as a version, files: %d", len(files))
            record = await self._model.adoption.adopt(files, 0)
        await self._note_checkpoint(record)
        return record

    async def _note_checkpoint(self, record: VersionRecord) -> None:
        if record.manifest is not None:
            self.checkpoint = await asyncio.to_thread(getattr, record.manifest.layout, "signature")

    def _offered(self) -> contextlib.AbstractAsyncContextManager[Sequence[OfferedFile]]:
        ask = self._session.engine.offer_checkpoint
        return offered(self._context.segments, ask, "the engine's checkpoint")

    async def _record(self, current: PreparedVersion) -> None:
        if self._served.live != current.record.version:
            self._served.set_live(current.record.version)
        await write_down(self._journal, self._model.serving, current)


def _written(states: Sequence[RankState], checkpoint: str = "") -> bool:
    """Whether a rank was written since it started, as far as the ranks know.

    `checkpoint` is the content digest of what they started with, empty when not known.
    """
    return any(
        state.answered
        and (
            (state.dirty or state.content_digest not in ("", checkpoint))
            if state.written is None
            else state.written
        )
        for state in states
    )


def _check_answers(states: Sequence[RankState]) -> None:
    """Refuse to guess whether an engine is as it started, which decides what must be proved."""
    silent = [state.rank for state in states if not state.answered]
    if silent and not _written(states):
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"rank {silent[0]} does not report which version it holds; check vLLM's log for "
            "the reason; the server asks it again",
        )


def _proved(current: PreparedVersion) -> bool:
    return all(report.proved for report in current.reports)


def _names(current: PreparedVersion) -> str:
    names = sorted({name for report in current.reports for name in report.mismatched})
    return ", ".join(names[:10])


def _not_copies(current: PreparedVersion) -> WeightSyncError:
    # A loader that does more than copy is found here: its parameters are not its tensors.
    what = "what a second load makes" if current.shadow else "plain copies"
    return WeightSyncError(
        Reason.ENGINE_UNSUPPORTED,
        f"the engine's live parameters are not {what} of its checkpoint ({_names(current)}); this "
        "model cannot be updated in place; if its files changed after vLLM loaded them, restart "
        "vLLM",
    )
