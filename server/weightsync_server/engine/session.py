"""One connection to one start of an engine, and what its ranks hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from weightsync.engine import FENCES_ON_EXPIRY, VERSION_LOADS, EngineState, OnExpiry, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.name_sets import unpack
from weightsync.shm.staged_version import StagedVersion
from weightsync_server.engine.engine_calls import answered
from weightsync_server.engine.outcome import Pause, PreparedVersion
from weightsync_server.engine.ranks import QUICK_S, Ranks
from weightsync_server.engine.refusals import check_ready, no_place
from weightsync_server.engine.serving_time import LimitRenewal, ServingTime
from weightsync_server.engine.version_loads import LoadScheduler, Presence
from weightsync_server.engine.worker_reports import NoPlan
from weightsync_server.nodes.engine_nodes import EngineNodes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from weightsync.engine import Engine, EngineInfo, OpenApply
    from weightsync.model.manifest import TensorEntry
    from weightsync.shm.segment_socket import SegmentServer
    from weightsync_server.engine.worker_reports import RankState, Report
    from weightsync_server.nodes import NodeGroup
    from weightsync_server.ops.metrics import LoaderMetrics
    from weightsync_server.residency.digests import StagedDigests
    from weightsync_server.residency.leases import SlotLease
    from weightsync_server.residency.segments import SegmentAllocator
    from weightsync_server.residency.stager import Stager

__all__ = ["EngineSession"]

logger = logging.getLogger(__name__)

#: A pause or resume that outlives its lease by this long has got lost, seconds.
_GRACE_S = 8.0
#: How often a resume is tried, and how long between two tries, seconds.
_TRIES, _AGAIN_S = 3, 0.1


@dataclass
class EngineSession:
    """An engine that has said hello.

    Attributes:
        engine: The engine.
        info: What it said.
        ranks: Its workers.
        lease_s: How long a pause lasts without renewal.
        stager: Gives leases on versions that ranks load.
        loaders: Where their loads are counted.
        loads: Has the ranks load versions; None: they write them by load plans.
        live: What every rank is proved to hold; None: not known.
        in_place: Version and name of what a trainer has written over that; None: nothing.
        plan_proved: Whether the live parameters were compared with the engine's own checkpoint.
        on_load: Awaited when the ranks have begun to load; None: nothing is.
        tidy: Whether the ranks were last seen to map only what exists, nothing of a server that
            was there before, and have mapped nothing on other nodes since.
        nodes: Servers of its other nodes; None: none may join.
        serving_time: For how long it may serve without this server, and begin to.
    """

    engine: Engine
    info: EngineInfo
    segments: SegmentServer
    lease_s: float
    stager: Stager
    loaders: LoaderMetrics
    ranks: Ranks = field(init=False)
    loads: LoadScheduler | None = field(default=None, init=False)
    live: PreparedVersion | None = None
    in_place: tuple[int, str] | None = None
    plan_proved: bool = False
    on_load: Callable[[], Awaitable[None]] | None = None
    tidy: bool = False
    nodes: NodeGroup | None = None
    serving_time: ServingTime = field(default_factory=ServingTime)
    # The lease under which it stands still now; "": none of ours.
    _lease_id: str = field(default="", init=False)
    _renewal: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Publish the status pages, and say for how long the engine may serve."""
        nodes = None
        if self.nodes is not None:
            nodes = EngineNodes(self.nodes, self.engine, self.info.nodes, self.info.ranks)
        self.ranks = Ranks(self.engine, self.info.ranks, self.segments, nodes)
        self._limit = LimitRenewal(self.engine, self.serving_time)

    def close(self) -> None:
        """Withdraw the status pages and let go of the live version's segments."""
        self._limit.stop()
        if self.loads is not None:
            self.loads.close()
        self.ranks.close()
        if self.live is not None:
            self.live.lease.release()
            self.live = None

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

        Args:
            lease: On the version.
            compare_live: Whether the live parameters are compared with it.
            timeout_s: Longest wait, seconds.
            proof_only: Whether that comparison is all, and no rank claims to hold it.
            patch: Whether the ranks may prepare to write only what differs from what is live.
            prefetched: What the ranks call what they have read of it already; "": nothing.
            digests: Begun for each shard as soon as no rank reads it any more; None: not here.
            apply_id: What the ranks shall call it; "": anything.

        Raises:
            WeightSyncError: ENGINE_REFUSED with names, when the model cannot take these tensors.
        """
        try:
            return await self._prepare(
                apply_id or secrets.token_hex(8),
                lease,
                compare_live=compare_live,
                timeout_s=timeout_s,
                proof_only=proof_only,
                base=self.live.apply_id if patch and self.live else "",
                prefetched=prefetched,
                digests=digests,
            )
        except BaseException as error:
            if isinstance(error, WeightSyncError) and error.reason is Reason.ENGINE_REFUSED:
                logger.warning("version %d is not taken: %s", lease.record.version, error.message)
            # A rank may still be at work on it, and would refuse the next prepare.
            await self.release_prepared()
            raise

    async def _prepare(
        self,
        apply_id: str,
        lease: SlotLease,
        *,
        compare_live: bool,
        timeout_s: float,
        proof_only: bool,
        base: str,
        prefetched: str,
        digests: StagedDigests | None,
    ) -> PreparedVersion:
        unloaded = ""
        start = time.perf_counter()
        deadline = start + timeout_s
        for attempt in range(2):
            if self.loads is not None:
                self.loads.on_start = self.on_load
                await self.loads.ensure(lease.record, deadline - time.perf_counter())
            if digests is not None:
                # What was digested before the ranks read it proves nothing of what they read.
                await digests.cancel()
            reports = await self.ranks.prepare(
                apply_id,
                lease.staged_id,
                compare_live=compare_live,
                timeout_s=timeout_s,
                proof_only=proof_only,
                base=base,
                prefetched=prefetched,
                unloaded=unloaded,
                content_digest=lease.record.content_digest,
                on_read=digests.begin if digests is not None and self.loads is None else None,
            )
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
        seconds = time.perf_counter() - start
        return PreparedVersion(apply_id, lease.record, lease, tuple(reports), seconds)

    def load_versions(self, differing: str) -> bool:
        """Have versions loaded beside generation from now on, where that is possible.

        Args:
            differing: Parameters that are not what the load plan makes of the engine's checkpoint.
        """
        if self.loads is not None or VERSION_LOADS not in self.info.capabilities:
            return False
        self._load_versions(NoPlan(f"vLLM computes these from the weights: {differing}"))
        return True

    def _load_versions(self, why: NoPlan) -> None:
        if why.cause:
            logger.info("versions of this engine are loaded beside generation: %s", why.cause)
        self.loads = LoadScheduler(self.ranks, self.stager, self.loaders, why, self._look)

    async def states(self) -> list[RankState]:
        """Ask what every rank holds, and how its versions are made live."""
        states = await self.ranks.states(QUICK_S)
        if self.loads is None and any(state.transform == "twin" for state in states):
            self._load_versions(NoPlan(""))
        return states

    async def _look(self) -> Presence:
        """Tell how this start of the engine is; one that does not answer may be there."""
        try:
            health = await self.engine.health()
        except WeightSyncError:
            return Presence.HERE
        if health.engine_id != self.info.engine_id or health.state is EngineState.DEAD:
            return Presence.LEFT
        return Presence.ASLEEP if health.sleeping else Presence.HERE

    async def _capture(self, lease: SlotLease, timeout_s: float) -> str:
        document = lease.staged_id
        # A node that came back meanwhile has nothing, and a pause is no time for a transfer.
        await self.ranks.stage(document, lease.record.content_digest, timeout_s)
        health = await self.engine.health()
        if health.state in (EngineState.UNRECONCILED, EngineState.FENCED, EngineState.PAUSED):
            return await self._captured(document, timeout_s)
        async with self.paused(PauseSpec(mode="keep", clear_cache=False)):
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

    async def takes(
        self, tensors: Sequence[TensorEntry], allocator: SegmentAllocator, *, whole: bool = False
    ) -> bool:
        """Ask every rank whether its model takes tensors, whatever their bytes; returns True.

        Args:
            tensors: Some of a version.
            allocator: Publishes what the ranks read them from.
            whole: They are all of it.

        Raises:
            WeightSyncError: ENGINE_REFUSED, naming those that it does not take, or needs.
        """
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

        Args:
            spec: How to pause.
            open_apply: An apply that others take part in: when the lease runs out the engine is
                fenced and asks for its decision. None: it resumes on what every rank holds.

        Raises:
            WeightSyncError: ENGINE_UNSUPPORTED: nothing was paused, it could only resume.
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

    def _fencing(self, spec: PauseSpec, open_apply: OpenApply) -> PauseSpec:
        self.check_fences()
        return replace(spec, on_expiry=OnExpiry.FENCE, apply=open_apply)

    def check_fences(self) -> None:
        """Refuse an engine that would resume when a pause runs out, whatever others do.

        Raises:
            WeightSyncError: ENGINE_UNSUPPORTED.
        """
        if FENCES_ON_EXPIRY not in self.info.capabilities:
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                "the plugin in vLLM would resume when a pause runs out, and this apply needs it to "
                "fence; install the same weightsync release on both sides",
            )

    def longest_pause_s(self, spec: PauseSpec) -> float:
        """Return how long vLLM may take to stand still, in seconds."""
        return self._longest_s + (spec.wait_timeout_s if spec.mode == "wait" else 0)

    @staticmethod
    def longest_resume_s() -> float:
        """Return how long all tries to resume may take, each with a look at the engine, in s."""
        return 2 * _TRIES * QUICK_S

    async def _renew(self, lease_id: str) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            # What failed once is tried again while the lease holds.
            with contextlib.suppress(WeightSyncError):
                await self.engine.renew(lease_id, self.lease_s)

    async def resume(self, current: PreparedVersion | None, tries: int = _TRIES) -> None:
        """Start generation on what every rank is proved to hold; it generates on return.

        Args:
            current: What they hold; None: what the engine started with.
            tries: How often it is tried while the engine stands still under a lease.

        Raises:
            WeightSyncError: Of the last try: no resume was confirmed.
        """
        record = current.record if current is not None else None
        version, digest = (record.version, current.digest) if record and current else (0, "")
        if self.serving_time.permitted_s(record) is None:
            return await self.resume_on(version, digest, tries)
        if self._renewal is not None:
            # One that is under way would prolong the lease beyond the permission.
            self._renewal.cancel()
            await asyncio.wait({self._renewal})
        before, time_s = self._lease_id, (self.lease_s, self._longest_s)
        async with self.serving_time.leased(self.engine, before, record, *time_s) as lease_id:
            self._lease_id = lease_id
            try:
                return await self.resume_on(version, digest, tries)
            finally:
                self._lease_id = before

    async def resume_on(self, version: int, digest: str, tries: int = _TRIES) -> None:
        """Start generation on what every rank calls by a digest, or a name; see `resume`.

        An engine that generates with it already is told its version, and this digest.

        Raises:
            WeightSyncError: Of the last try: no resume was confirmed.
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
        """Return what this start of the engine says that it does; None: it cannot be asked."""
        try:
            health = await self.engine.health()
        except WeightSyncError:
            return None
        return health.state if health.engine_id == self.info.engine_id else None

    @property
    def _longest_s(self) -> float:
        return min(QUICK_S, self.lease_s + _GRACE_S)

    async def hold(self, prepared: PreparedVersion) -> None:
        """Record what every rank holds, and let the ranks drop everything else."""
        if self.live is not None and self.live.lease is not prepared.lease:
            self.live.lease.release()
        self.live, self.in_place = prepared, None
        if self.info.nodes > 1:
            # Other nodes have copies of their own, of which no segment here is retired.
            self.tidy = False
        await self.release_prepared()

    async def unmap(self, existing: frozenset[str], prefetched: str = "") -> frozenset[str] | None:
        """Let every rank unmap segments that do not exist any more; tells as `Ranks.unmap` does.

        Args:
            existing: Segments that still exist.
            prefetched: What the ranks may be reading ahead, and go on with.
        """
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
            logger.warning("the ranks keep what they prepared for now: %s", error.message)


def _need(reports: Sequence[Report]) -> str:
    """Return what ranks need that are not ready, if that is all they say; "": nothing."""
    phases = {report.phase for report in reports} - {"ready"}
    return phases.pop() if phases in ({"needs_capture"}, {"needs_load"}) else ""
