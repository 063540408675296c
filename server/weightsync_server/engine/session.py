"""One connection to one start of an engine, and what its ranks hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from weightsync.engine import (
    FENCES_ON_EXPIRY,
    VERSION_LOADS,
    CacheUse,
    Engine,
    EngineInfo,
    EngineState,
    OnExpiry,
    OpenApply,
    PauseSpec,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import TensorEntry
from weightsync.model.name_sets import unpack
from weightsync.shm.staged_version import StagedVersion
from weightsync_server.engine.engine_parts import EngineContext, LimitRenewal, answered
from weightsync_server.engine.outcome import Pause, PreparedVersion
from weightsync_server.engine.ranks import QUICK_S, Ranks
from weightsync_server.engine.refusals import check_ready, no_place
from weightsync_server.engine.version_loads import EngineLiveness, LoadScheduler, OnStart
from weightsync_server.engine.worker_reports import NoPlan, RankState, Report
from weightsync_server.nodes import EngineNodes
from weightsync_server.ops.tasks import cancel_tasks
from weightsync_server.residency.slot import SlotLease
from weightsync_server.residency.stager import StagedDigests

logger = logging.getLogger(__name__)

#: A pause or resume that outlives its lease by this long has got lost, seconds.
_GRACE_S = 8.0
#: How often a resume is tried, and how long between two tries, seconds.
_TRIES, _AGAIN_S = 3, 0.1


class EngineSession:
    """An engine that has said hello.

    Attributes:
        lease_s: How long a pause lasts without renewal.
        loads: Has the ranks load versions; None: they write them by load plans.
        live: What every rank is proved to hold; None: not known.
        in_place: Version and name of what a trainer has written over that.
        plan_proved: Whether the live parameters were compared with the engine's own checkpoint.
        tidy: Whether the ranks were last seen to map only what exists, nothing of a server that was
            there before, and have mapped nothing on other nodes since.
    """

    def __init__(self, engine: Engine, info: EngineInfo, context: EngineContext) -> None:
        self.engine, self.info, self.context = engine, info, context
        self.lease_s = context.limits.pause_lease_s
        nodes = EngineNodes(context.nodes, engine, info.nodes, info.ranks)
        self.ranks = Ranks(engine, info.ranks, context.segments, nodes)
        self.loads: LoadScheduler | None = None
        self.live: PreparedVersion | None = None
        self.in_place: tuple[int, str] | None = None
        self.plan_proved = self.tidy = False
        self._on_load: OnStart | None = None
        # The lease under which it stands still now; "": none of ours.
        self._lease_id = ""
        self._renewal: asyncio.Task[None] | None = None
        self._limit = LimitRenewal(engine, context.serving_time)

    def close(self) -> None:
        self._limit.stop()
        if self.loads is not None:
            self.loads.close()
        self.ranks.close()
        if self.live is not None:
            self.live.lease.release()
            self.live = None

    @contextlib.contextmanager
    def awaiting_loads(self, on_load: OnStart) -> Iterator[None]:
        """Have `on_load` awaited when the ranks begin to load what is prepared meanwhile."""
        self._on_load = on_load
        try:
            yield
        finally:
            self._on_load = None

    async def prepare(
        self,
        lease: SlotLease,
        *,
        compare_live: bool,
        timeout_s: float,
        proof_only: bool = False,
        patch: bool = False,
        prefetched: str = "",
        digests: StagedDigests | None = None,
        apply_id: str = "",
    ) -> PreparedVersion:
        """Have every rank prepare a version; captures its load plan first where it is new.

        With `proof_only` the comparison with the live parameters is all, and no rank claims to hold
        the version. With `patch` the ranks may prepare to write only what differs from what is
        live. `prefetched` is what the ranks call what they have read of it already, "" for nothing.
        `digests` are begun for each shard as soon as no rank reads it any more.
        """
        start = time.perf_counter()
        name = apply_id or secrets.token_hex(8)
        ask = partial(
            self.ranks.prepare,
            name,
            lease.staged_id,
            compare_live=compare_live,
            timeout_s=timeout_s,
            proof_only=proof_only,
            base=self.live.apply_id if patch and self.live else "",
            prefetched=prefetched,
            content_digest=lease.record.content_digest,
        )
        try:
            reports = await self._ready(lease, ask, timeout_s, digests)
        except BaseException as error:
            if isinstance(error, WeightSyncError) and error.reason is Reason.ENGINE_REFUSED:
                logger.warning(
                    "version %d was not accepted: %s", lease.record.version, error.message
                )
            # A rank may still be at work on it, and would refuse the next prepare.
            await self.release_prepared()
            raise
        seconds = time.perf_counter() - start
        return PreparedVersion(name, lease.record, lease, tuple(reports), seconds)

    async def _ready(
        self,
        lease: SlotLease,
        ask: Callable[..., Awaitable[list[Report]]],
        timeout_s: float,
        digests: StagedDigests | None,
    ) -> list[Report]:
        unloaded, deadline = "", time.perf_counter() + timeout_s
        for attempt in range(2):
            if self.loads is not None:
                left_s = deadline - time.perf_counter()
                await self.loads.ensure(lease.record, left_s, self._on_load)
            if digests is not None:
                # What was digested before the ranks read it proves nothing of what they read.
                await digests.cancel()
            on_read = digests.begin if digests is not None and self.loads is None else None
            reports = await ask(unloaded=unloaded, on_read=on_read)
            if attempt or not (need := _need(reports)):
                break
            if need == "needs_load" and self.loads is not None:
                self.loads.forget()
            elif self.loads is None:
                unloaded = await self._capture(lease, timeout_s)
        # Who needs a capture has nothing to say of what another one refused.
        check_ready(sorted(reports, key=lambda report: report.phase == "needs_capture"))
        if digests is not None and self.loads is not None:
            # It was proved when the ranks had read it to load it; they read it no more.
            digests.trust(frozenset(range(len(lease.segments))))
        elif digests is not None and not any(report.unlike for report in reports):
            digests.trust(frozenset.intersection(*(report.shards for report in reports)))
        return reports

    def load_versions(self, differing: str) -> bool:
        """Have versions loaded beside generation from now on, where that is possible.

        The parameters in `differing` are not what the load plan makes of the engine's checkpoint.
        """
        if self.loads is not None or VERSION_LOADS not in self.info.capabilities:
            return False
        self._load_versions(NoPlan(f"vLLM computes these from the weights: {differing}"))
        return True

    def _load_versions(self, why: NoPlan) -> None:
        if why.cause:
            logger.info("versions of this engine are loaded beside generation: %s", why.cause)
        stager, metrics = self.context.model.stager, self.context.metrics.loaders
        self.loads = LoadScheduler(self.ranks, stager, metrics, why, self._look)

    async def states(self) -> list[RankState]:
        states = await self.ranks.states(QUICK_S)
        if self.loads is None and any(state.transform == "twin" for state in states):
            self._load_versions(NoPlan(""))
        return states

    async def _look(self) -> EngineLiveness:
        """Tell how this start of the engine is; one that does not answer may be there."""
        try:
            health = await self.engine.health()
        except WeightSyncError:
            return EngineLiveness.HERE
        if health.engine_id != self.info.engine_id or health.state is EngineState.DEAD:
            return EngineLiveness.LEFT
        return EngineLiveness.ASLEEP if health.sleeping else EngineLiveness.HERE

    async def _capture(self, lease: SlotLease, timeout_s: float) -> str:
        document = lease.staged_id
        # A node that came back meanwhile has nothing, and a pause is no time for a transfer.
        await self.ranks.stage(document, lease.record.content_digest, timeout_s)
        health = await self.engine.health()
        if health.state in (EngineState.UNRECONCILED, EngineState.FENCED, EngineState.PAUSED):
            return await self._captured(document, timeout_s)
        async with self.paused(PauseSpec(mode="keep", cache=CacheUse.KEEP)):
            try:
                return await self._captured(document, timeout_s)
            finally:
                # Capture writes nothing, so the engine goes on with what it had.
                if not self.ranks.hung:
                    await self._resume_as_before()

    async def _resume_as_before(self) -> None:
        if self.in_place is not None:
            await self.resume_on(*self.in_place)
        else:
            await self.resume(self.live)

    async def _captured(self, document: str, timeout_s: float) -> str:
        unloaded, why = await self.ranks.capture(document, timeout_s)
        if why is not None:
            self._load_versions(why)
        return unloaded

    async def takes(self, tensors: Sequence[TensorEntry], *, whole: bool = False) -> bool:
        """Ask every rank whether its model takes tensors, whatever their bytes; returns True.

        With `whole` they are all of a version, and what it needs must be there.
        """
        allocator = self.context.model.segments
        segment = await allocator.write(StagedVersion.without_bytes(tensors).to_segment)
        try:
            unplaced = await self.ranks.check(segment.id, whole=whole)
        finally:
            allocator.retire(segment)
        if unplaced and (names := unpack(unplaced, (tensor.name for tensor in tensors))):
            raise no_place(sorted(names))
        return True

    @contextlib.asynccontextmanager
    async def paused(
        self, spec: PauseSpec, open_apply: OpenApply | None = None
    ) -> AsyncIterator[Pause]:
        """Pause generation and keep the lease; the body resumes or fences before it ends.

        `open_apply` is an apply that others take part in: when the lease runs out, the engine is
        fenced and asks for its decision. Without it the engine resumes on what every rank holds.
        ENGINE_UNSUPPORTED: nothing was paused, it could only resume.
        """
        if open_apply is not None:
            spec = self._fencing(spec, open_apply)
        began, longest = time.perf_counter(), self.longest_pause_s(spec)
        lease = await answered(self.engine.pause(spec, self.lease_s), longest, "pause")
        pause = Pause(lease.mode, time.perf_counter() - began, began)
        self._renewal = renewal = asyncio.create_task(self._renew(lease.lease_id))
        self._lease_id = lease.lease_id
        try:
            yield pause
        finally:
            self._lease_id, self._renewal = "", None
            renewal.cancel()

    async def score(
        self, sequences: Sequence[Sequence[int]], limit_s: float, *, paused: bool
    ) -> list[list[float]]:
        """As `Engine.score`: in the pause that this session has, or beside generation."""
        lease_id = self._lease_id if paused else ""
        return await self.engine.score(sequences, lease_id, limit_s)

    def _fencing(self, spec: PauseSpec, open_apply: OpenApply) -> PauseSpec:
        self.check_fences()
        return replace(spec, on_expiry=OnExpiry.FENCE, apply=open_apply)

    def check_fences(self) -> None:
        """Refuse an engine that would resume when a pause runs out, whatever others do."""
        if FENCES_ON_EXPIRY not in self.info.capabilities:
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                "the plugin in vLLM resumes when a pause times out, but this apply needs it to "
                "fence; install the same weightsync release on both sides",
            )

    def longest_pause_s(self, spec: PauseSpec) -> float:
        return self._longest_s + (spec.wait_timeout_s if spec.mode == "wait" else 0)

    @staticmethod
    def longest_resume_s() -> float:
        """Return how long all tries to resume may take, each with a look at the engine."""
        return 2 * _TRIES * QUICK_S

    async def _renew(self, lease_id: str) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            # What failed once is tried again while the lease holds.
            with contextlib.suppress(WeightSyncError):
                await self.engine.renew(lease_id, self.lease_s)

    async def resume(self, current: PreparedVersion | None, tries: int = _TRIES) -> None:
        """Start generation on what every rank is proved to hold; it generates on return.

        `current` None: what the engine started with. If this raises, no resume was confirmed.
        """
        record = current.record if current is not None else None
        version, digest = (record.version, current.digest) if record and current else (0, "")
        serving_time = self.context.serving_time
        if serving_time.permitted_s(record) is None:
            return await self.resume_on(version, digest, tries)
        # One that is under way would prolong the lease beyond the permission.
        await cancel_tasks(self._renewal)
        before, time_s = self._lease_id, (self.lease_s, self._longest_s)
        async with serving_time.leased(self.engine, before, record, *time_s) as lease_id:
            self._lease_id = lease_id
            try:
                return await self.resume_on(version, digest, tries)
            finally:
                self._lease_id = before

    async def resume_on(self, version: int, digest: str, tries: int = _TRIES) -> None:
        """Start generation on what every rank calls by a digest, or a name; see `resume`.

        An engine that generates with it already is told its version, and this digest.
        """
        for _ in range(tries):
            await self._limit.renew()
            try:
                call = self.engine.resume(self._lease_id, version, digest)
                await answered(call, self._longest_s, "resume")
            except WeightSyncError as error:
                failure = error
            else:
                return
            # The answer may be all that was lost: the engine is asked. It generates only on what
            # every rank holds, and that is this version.
            state = await self.state()
            if state is EngineState.SERVING:
                return
            if state is not EngineState.PAUSED:
                break
            await asyncio.sleep(_AGAIN_S)
        raise failure

    async def state(self) -> EngineState | None:
        try:
            health = await self.engine.health()
        except WeightSyncError:
            return None
        return health.state if health.engine_id == self.info.engine_id else None

    @property
    def _longest_s(self) -> float:
        return min(QUICK_S, self.lease_s + _GRACE_S)

    async def hold(self, prepared: PreparedVersion) -> None:
        if self.live is not None and self.live.lease is not prepared.lease:
            self.live.lease.release()
        self.live, self.in_place = prepared, None
        if self.info.nodes > 1:
            # Other nodes have copies of their own, of which no segment here is retired.
            self.tidy = False
        await self.release_prepared()

    async def unmap(self, existing: frozenset[str], prefetched: str = "") -> frozenset[str] | None:
        """As `Ranks.unmap`; ranks that read ahead what `prefetched` names go on with it."""
        keep = [prefetched, self.live.apply_id] if self.live else [prefetched]
        mapped = await self.ranks.unmap(keep, existing, QUICK_S)
        self.tidy = mapped is not None and mapped <= existing
        return mapped

    async def release_prepared(self) -> None:
        """Let the ranks drop all that they prepared and are at work on, but for what is live."""
        keep = [self.live.apply_id] if self.live else []
        try:
            await self.ranks.release(keep, QUICK_S)
        except WeightSyncError as error:
            # Memory of the workers only; the next release drops it as well.
            logger.warning("the ranks could not release what they prepared yet: %s", error.message)


def _need(reports: Sequence[Report]) -> str:
    """Return what ranks need that are not ready, if that is all they say; "": nothing."""
    phases = {report.phase for report in reports} - {"ready"}
    return phases.pop() if phases in ({"needs_capture"}, {"needs_load"}) else ""
