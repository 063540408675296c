"""One pause: from the last token of the old version to the first of the new one, or of the old one.

pause:   INTENT -> pause
write:   commit + verify on every rank -> all equal? -> score probes, with a gate
release: resume on the new version
go_back: restore the old one, verify, resume
         -> else: fence

Between these the caller may wait for others. In mode between_steps the ranks do all of that in one
call, and nothing pauses.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Never, TypeVar

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS, EngineState, OpenApply, SwitchOrder
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.engine.apply_progress import ApplyProgress
from weightsync_server.engine.gate import refusal, refuses, score_target
from weightsync_server.engine.journal import Journal, disk_errors_logged
from weightsync_server.engine.outcome import ApplyCause, CutoverPlan, CutoverResult, PreparedVersion
from weightsync_server.engine.refusals import OUT_OF_REACH
from weightsync_server.engine.session import EngineSession
from weightsync_server.engine.worker_reports import RankCommit
from weightsync_server.ops import traces
from weightsync_server.ops.metrics import EngineMetrics
from weightsync_server.ops.os_errors import translate_os_errors

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


def _failures(replies: list[RankCommit], digest: str) -> list[str]:
    return [
        f"rank {reply.rank}: {reply.error or 'proved ' + (reply.content_digest or 'nothing')}"
        for reply in replies
        if reply.error or reply.content_digest != digest
    ]


def _trace_ranks(commit: traces.TracedPhase | None, ranks: list[RankCommit]) -> None:
    """Tell apart what each rank took to write and to prove, which is one call."""
    if commit is None or (work := traces.current()) is None:
        return
    longest_ns = round(max((rank.verify_s for rank in ranks), default=0.0) * 1e9)
    written_ns = max(commit.began_ns, commit.ended_ns - longest_ns)
    verify = traces.TracedPhase("apply.verify", written_ns, commit.ended_ns, dict(commit.facts))
    commit.ended_ns = written_ns
    for rank in ranks:
        commit.add_rank(rank.rank, rank.commit_s, rank.error)
        verify.add_rank(rank.rank, rank.verify_s)
    work.add(verify)


def _restored(
    base: PreparedVersion, failures: list[str], *, at_fault: bool = True
) -> WeightSyncError:
    remedy = "set clear_rejected to apply it again, or apply another one"
    return WeightSyncError(
        Reason.APPLY_RESTORED,
        f"the apply failed and version {base.record.version} was restored and verified on "
        f"every rank ({'; '.join(failures)}); {remedy if at_fault else 'apply it again'}",
    )


@contextlib.contextmanager
def _cut_short() -> Iterator[None]:
    """Say of an error of this host that nobody knows what it has left of a pause."""
    try:
        yield
    except OSError as error:
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"the apply was interrupted during its pause ({error.strerror or error}); the server "
            "asks every rank which version it holds; see GetStatus for what the engine serves",
            retry_after_s=1.0,
        ) from error


class Cutover:
    """Makes one prepared version live, or puts the old one back.

    An engine whose ranks take longer than `commit_timeout_s` to write and prove is fenced. Whatever
    one of its steps raises, `abandon` must follow, or the engine stands still for as long as this
    lives. `compared_all`: every rank compared all of a restored version with what this server
    received, and not with memory in which it had lain since. `at_fault`: the target itself failed
    here, and not another engine or the disk.
    """

    def __init__(
        self,
        session: EngineSession,
        journal: Journal,
        shown: EngineMetrics,
        progress: ApplyProgress,
    ) -> None:
        self._session, self._journal = session, journal
        self._metrics, self._shown = session.context.metrics, shown
        self._enter = progress.enter
        self._timeout_s = session.context.limits.commit_timeout_s
        self._open = contextlib.AsyncExitStack()
        self._began = 0.0
        self._written = False
        self._result = CutoverResult()
        self.compared_all = True
        self.at_fault = False

    async def run(self, plan: CutoverPlan) -> CutoverResult:
        """Return when an engine that waits for nobody generates on the target; DONE must follow.

        Raises:
            WeightSyncError: APPLY_RESTORED: the engine generates on the base, proved on every rank;
                `journal.restored` must follow. ENGINE_FENCED: the engine stands still, with the
                reason. ENGINE_AWAY: it is gone, or nobody knows what it holds until its ranks are
                asked.
            OSError: Nothing was paused or written.
        """
        if plan.spec.mode == BETWEEN_STEPS:
            return await self._switch(plan)
        await self.pause(plan)
        if failures := await self.write(plan) or await self._let_go(plan):
            await self.go_back(plan, failures)
        return await self.release(plan)

    @property
    def gate(self) -> pb.GateReport | None:
        """What scoring has shown; None: nothing was scored, or not yet."""
        return self._result.gate

    async def pause(
        self, plan: CutoverPlan, *, alone: bool = True, patience_s: float = 0.0
    ) -> None:
        """Return when the engine stands still; INTENT was written, by others if not `alone`.

        It keeps the lease of its pause. If not `alone`, or with a gate before the resume, the
        engine is fenced when that runs out, and asks for the decision, which may take `patience_s`.
        Each step raises as `run`.
        """
        self._enter(pb.RUNNING_PHASE_PAUSE)
        await self._begin(plan, alone=alone)
        longest, open_apply = 0.0, None
        if not alone:
            # Others stand still and are written later.
            longest = self._session.longest_pause_s(plan.spec) + self._timeout_s + patience_s
        if not alone or plan.gated:
            target = plan.target
            open_apply = OpenApply(target.apply_id, plan.base.record.version, target.record.version)
        with _cut_short():
            self._open.enter_context(self._bounded(plan, longest))
            paused = self._session.paused(plan.spec, open_apply)
            with traces.phase("apply.pause", engine=self._journal.engine):
                pause = await self._open.enter_async_context(paused)
        self._began = pause.began
        self._result.pause_mode, self._result.pause_s = pause.mode, pause.seconds
        self._enter(pb.RUNNING_PHASE_WAIT)

    async def write(self, plan: CutoverPlan) -> list[str]:
        """Commit on every rank and verify; return why that failed, empty: the target is proved."""
        self._enter(pb.RUNNING_PHASE_COMMIT)
        with _cut_short():
            self._written = True
            failures = await self._tried(lambda: self._commit(plan.target, self._result))
            self.at_fault = bool(failures)
            if plan.gated and not failures:
                failures = await self._score(plan)
        self._enter(pb.RUNNING_PHASE_WAIT)
        return failures

    async def _score(self, plan: CutoverPlan) -> list[str]:
        """Return why the target is not let go by its probes; empty: it is."""
        self._enter(pb.RUNNING_PHASE_SCORE)
        await failpoints.reach("gate.score")
        report = await score_target(self._session, plan, self._journal.engine)
        self._result.gate = report
        self._result.score_s = report.took.ToNanoseconds() / 1e9
        await failpoints.reach("gate.scored")
        return [report.reason] if refuses(report) else []

    async def _let_go(self, plan: CutoverPlan) -> list[str]:
        """Write down that the target is let go, before anybody is served by it.

        Returns why that is not written down; empty: it is, or there is no gate.
        """
        if not plan.gated:
            return []
        try:
            with translate_os_errors("the apply"):
                await failpoints.reach("gate.decide")
                await self._journal.commit(plan)
                await failpoints.reach("gate.decided")
        except WeightSyncError as error:
            return [error.message]
        return []

    async def release(self, plan: CutoverPlan) -> CutoverResult:
        """Return when the engine generates on the target, which every rank was proved to hold."""
        start = time.perf_counter()
        self._enter(pb.RUNNING_PHASE_RESUME)
        with _cut_short():
            await failpoints.reach("apply.resume")
            await self.resume(plan.target)
        self._result.resume_s = time.perf_counter() - start
        await self.abandon()
        self._enter(pb.RUNNING_PHASE_WAIT)
        self._result.paused_s = time.perf_counter() - self._began
        return await self._ended()

    async def go_back(self, plan: CutoverPlan, failures: list[str]) -> Never:
        """Raise when the engine generates on the base, proved again if anything was written."""
        self._enter(pb.RUNNING_PHASE_RESTORE)
        with _cut_short():
            if self._written:
                await self._restore(plan.base, failures)
            await self.resume(plan.base)
        if self.gate is not None and refuses(self.gate):
            raise refusal(self.gate, plan.base.record.version)
        raise _restored(plan.base, failures, at_fault=self.at_fault)

    async def abandon(self) -> None:
        """Renew the pause no longer: an engine that stands still is left to its lease."""
        await self._open.aclose()

    async def _begin(self, plan: CutoverPlan, *, alone: bool) -> None:
        await failpoints.reach("apply.intent")
        self._refuse_second(plan.cause)
        if alone:
            await self._journal.intent(plan)
        await failpoints.reach("apply.pause")

    async def _ended(self) -> CutoverResult:
        with disk_errors_logged():
            await failpoints.reach("apply.resumed")
        for phase in ("pause", "commit", "verify", "resume", "paused"):
            self._metrics.observe_phase(phase, getattr(self._result, f"{phase}_s"))
        self._metrics.add_written(self._result.written_bytes)
        return self._result

    async def place(self, target: PreparedVersion) -> None:
        """Commit into an engine that stands still already; the caller resumes it."""
        await self._journal.intent_to_place(target)
        failures = await self._commit(target, CutoverResult())
        if failures:
            await self._fence(failures)

    async def resume(self, current: PreparedVersion) -> None:
        """Have an engine generate that stands still; ENGINE_AWAY: that was not confirmed.

        Every rank must be proved to hold `current`.
        """
        try:
            with traces.phase("apply.resume", **self._facts(current.record)):
                await self._session.resume(current)
        except WeightSyncError as error:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"every rank holds version {current.record.version}, but the resume was not "
                f"confirmed ({error.message}); see GetStatus for what the engine serves",
                retry_after_s=1.0,
            ) from error

    async def _switch(self, plan: CutoverPlan) -> CutoverResult:
        self._enter(pb.RUNNING_PHASE_COMMIT)
        await self._begin(plan, alone=True)
        with _cut_short(), self._bounded(plan):
            await self._between(plan)
        return await self._ended()

    async def _between(self, plan: CutoverPlan) -> None:
        target, base, result = plan.target, plan.base, self._result
        result.pause_mode = BETWEEN_STEPS
        order = SwitchOrder(
            apply_id=target.apply_id,
            base_id=base.apply_id,
            version=target.record.version,
            content_digest=target.digest,
            base_digest=base.digest,
            limit_s=self._timeout_s,
            cache=plan.spec.cache,
        )
        result.ranks, serves = await self._tried(lambda: self._switched(order, target.record))
        failures = _failures(result.ranks, target.digest)
        if failures and serves == base.digest:
            self.compared_all, self.at_fault = result.compared_all, True
            raise _restored(base, failures)
        if failures or serves != target.digest:
            await self._fence(failures or ["the ranks reported different versions"])
        self._count(target, result)
        result.paused_s = max(rank.switch_s for rank in result.ranks)

    async def _switched(
        self, order: SwitchOrder, record: VersionRecord
    ) -> tuple[list[RankCommit], str]:
        ranks = self._session.ranks
        self._session.context.serving_time.permitted_s(record)
        try:
            # For the commit and, where it fails, for the way back.
            with traces.phase("apply.switch", **self._facts(record)) as phase:
                switched = await ranks.switch(order, 2 * self._timeout_s)
                if phase is not None:
                    for rank in switched[0]:
                        phase.add_rank(rank.rank, rank.switch_s, rank.error)
            return switched
        except WeightSyncError as error:
            if ranks.hung or error.reason in {*OUT_OF_REACH, Reason.FAULT}:
                # Nobody knows what the ranks hold until they are asked.
                await self._fence([error.message])
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"the engine did not begin to switch ({error.message}); apply again",
                retry_after_s=1.0,
            ) from error

    async def _tried(self, write: Callable[[], Awaitable[_T]]) -> _T:
        await failpoints.reach("apply.commit")
        written = await write()
        await failpoints.reach("apply.committed")
        return written

    def _refuse_second(self, cause: ApplyCause) -> None:
        if cause.key and self._journal.answered(cause.key) is not None:
            logger.critical(
                "invariant idempotent is violated: a call that was already answered is carried "
                "out again"
            )
            self._metrics.violate("idempotent")
            raise WeightSyncError(
                Reason.FAULT,
                "this call was already answered, and nothing was repeated; call again",
            )

    def _bounded(
        self, plan: CutoverPlan, others_s: float = 0.0
    ) -> contextlib.AbstractContextManager[None]:
        # Two commits, a fence or as many resumes as are tried, each with a look at the engine.
        longest = self._session.longest_pause_s(plan.spec) + 2 * self._timeout_s
        longest += self._session.longest_resume_s() + others_s
        longest += 2 * plan.gate.limit_s if plan.gate is not None else 0.0
        return self._metrics.bounds.within(f"the pause of apply {plan.target.apply_id}", longest)

    async def _commit(self, target: PreparedVersion, result: CutoverResult) -> list[str]:
        try:
            with traces.phase("apply.commit", **self._facts(target.record)) as phase:
                result.ranks = await self._session.ranks.commit(
                    target.apply_id, target.record.version, self._timeout_s
                )
            _trace_ranks(phase, result.ranks)
        except WeightSyncError as error:
            if self._session.ranks.hung or error.reason in OUT_OF_REACH:
                # Nobody knows what the ranks hold until that call returns.
                await self._fence([error.message])
            if await self._session.state() is EngineState.SERVING:
                # The lease ran out before the commit came, and nothing was written.
                raise WeightSyncError(
                    Reason.ENGINE_AWAY,
                    "apply again: the engine resumed the previous version before the commit "
                    f"reached it ({error.message})",
                    retry_after_s=1.0,
                ) from error
            return [error.message]
        self._count(target, result)
        return _failures(result.ranks, target.digest)

    def _facts(self, record: VersionRecord) -> dict[str, str | int]:
        """Return what spans of its phases say."""
        return {"engine": self._journal.engine, "version": record.version}

    def _count(self, target: PreparedVersion, result: CutoverResult) -> None:
        self._shown.set_served(
            {
                rank.rank: target.record.version if rank.content_digest == target.digest else 0
                for rank in result.ranks
            }
        )
        result.commit_s = max(rank.commit_s for rank in result.ranks)
        result.verify_s = max(rank.verify_s for rank in result.ranks)

    async def _restore(self, base: PreparedVersion, failures: list[str]) -> None:
        why = "; ".join(failures)
        logger.error("apply failed, restoring: %s", why, extra=event("apply.restoring"))
        await failpoints.reach("apply.restore")
        result = CutoverResult()
        again = await self._commit(base, result)
        if again:
            await self._fence(failures + again)
        self.compared_all = result.compared_all
        await failpoints.reach("apply.restored")

    async def _fence(self, failures: list[str]) -> Never:
        reason = "; ".join(failures)
        await failpoints.reach("apply.fence")
        try:
            await self._session.engine.fence(reason)
        except WeightSyncError as error:
            # The lease runs out and the bridge decides by what the ranks hold.
            reason = f"{reason}; {error.message}"
        raise WeightSyncError(
            Reason.ENGINE_FENCED,
            f"the engine is fenced and serves nothing: {reason}; the server keeps trying to "
            "restore the live version; restart vLLM if that does not help",
        )
