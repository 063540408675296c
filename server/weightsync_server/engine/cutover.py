"""One pause: from the last token of the old version to the first of the new one, or of the old one.

INTENT -> pause -> commit + verify on every rank -> all equal? resume on the new version
                                                 -> else: restore the old one, verify, resume
                                                 -> else: fence

In mode between_steps the ranks do all of that in one call, and nothing pauses.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Never, TypeVar

from weightsync import failpoints
from weightsync.engine import BETWEEN_STEPS, EngineState, SwitchOrder
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine.journal import disk_errors_logged
from weightsync_server.engine.outcome import CutoverResult
from weightsync_server.engine.refusals import OUT_OF_REACH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.journal import Journal
    from weightsync_server.engine.outcome import Cause, CutoverPlan, PreparedVersion
    from weightsync_server.engine.session import EngineSession
    from weightsync_server.engine.together import Member
    from weightsync_server.engine.worker_reports import RankCommit
    from weightsync_server.ops.engine_metrics import EngineMetrics
    from weightsync_server.ops.metrics import Metrics

__all__ = ["Cutover"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def _failures(replies: list[RankCommit], digest: str) -> list[str]:
    return [
        f"rank {reply.rank}: {reply.error or 'proved ' + (reply.content_digest or 'nothing')}"
        for reply in replies
        if reply.error or reply.content_digest != digest
    ]


def _restored(
    base: PreparedVersion, failures: list[str], *, at_fault: bool = True
) -> WeightSyncError:
    remedy = "set clear_rejected to apply it again, or apply another one"
    return WeightSyncError(
        Reason.APPLY_RESTORED,
        f"the apply failed and version {base.record.version} was restored and verified on "
        f"every rank ({'; '.join(failures)}); {remedy if at_fault else 'apply it again'}",
    )


class Cutover:
    """Makes one prepared version live, or puts the old one back.

    Args:
        session: The engine.
        journal: Where INTENT goes.
        metrics: Where the phases go.
        shown: Where the ranks' versions go.
        commit_timeout_s: Longest time for the ranks to write and prove; then the engine is fenced.
        together: What it waits for, where others do the same at once; None: nothing.

    Attributes:
        compared_all: Whether every rank compared all of a version that was put back with what this
            server received, and not with memory in which it lay since.
        at_fault: Whether it was the target that failed here, and not another engine, or the disk.
    """

    def __init__(
        self,
        session: EngineSession,
        journal: Journal,
        metrics: Metrics,
        shown: EngineMetrics,
        commit_timeout_s: float,
        together: Member | None = None,
    ) -> None:
        self._session = session
        self._journal = journal
        self._metrics = metrics
        self._shown = shown
        self._together = together
        self._timeout_s = commit_timeout_s
        self.compared_all = True
        self.at_fault = False

    async def run(self, plan: CutoverPlan) -> CutoverResult:
        """Return when the engine generates on the target, proved on every rank; DONE must follow.

        Raises:
            WeightSyncError: APPLY_RESTORED: the engine generates on the base, proved on every rank;
                `journal.restored` must follow. ENGINE_FENCED: the engine stands still, with the
                reason. ENGINE_AWAY: it is gone, or nobody knows what it holds until its ranks are
                asked.
            OSError: Nothing was paused or written.
        """
        result = CutoverResult()
        await failpoints.reach("apply.intent")
        self._refuse_second(plan.cause)
        if self._together is None:
            await self._journal.intent(plan)
        await failpoints.reach("apply.pause")
        try:
            with self._bounded(plan):
                await self._made_live(plan, result)
        except OSError as error:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"the apply was cut short in its pause ({error.strerror or error}); every rank is "
                "asked what it holds, and GetStatus tells what the engine serves",
                retry_after_s=1.0,
            ) from error
        with disk_errors_logged():
            await failpoints.reach("apply.resumed")
        self._observe(result)
        return result

    async def place(self, target: PreparedVersion) -> None:
        """Commit into an engine that stands still already; the caller resumes it.

        Raises:
            WeightSyncError: ENGINE_FENCED with the reason.
        """
        await self._journal.intent_to_place(target)
        failures = await self._commit(target, CutoverResult())
        if failures:
            await self._fence(failures)

    async def resume(self, current: PreparedVersion) -> None:
        """Have an engine generate that stands still.

        Args:
            current: What every rank is proved to hold.

        Raises:
            WeightSyncError: ENGINE_AWAY; that was not confirmed.
        """
        try:
            await self._session.resume(current)
        except WeightSyncError as error:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"every rank holds version {current.record.version}, but the resume was not "
                f"confirmed ({error.message}); GetStatus tells what the engine serves",
                retry_after_s=1.0,
            ) from error

    async def _made_live(self, plan: CutoverPlan, result: CutoverResult) -> None:
        if self._together is not None:
            await self._paused_together(plan, result, self._together)
        elif plan.spec.mode == BETWEEN_STEPS:
            await self._between(plan, result)
        else:
            await self._paused(plan, result)

    async def _between(self, plan: CutoverPlan, result: CutoverResult) -> None:
        target, base = plan.target, plan.base
        result.pause_mode = BETWEEN_STEPS
        order = SwitchOrder(
            apply_id=target.apply_id,
            base_id=base.apply_id,
            version=target.record.version,
            content_digest=target.digest,
            base_digest=base.digest,
            limit_s=self._timeout_s,
        )
        result.ranks, serves = await self._tried(lambda: self._switched(order, target.record))
        failures = _failures(result.ranks, target.digest)
        if failures and serves == base.digest:
            self.compared_all, self.at_fault = result.compared_all, True
            raise _restored(base, failures)
        if failures or serves != target.digest:
            await self._fence(failures or ["the ranks did not tell one version"])
        self._count(target, result)
        result.paused_s = max(rank.switch_s for rank in result.ranks)

    async def _switched(
        self, order: SwitchOrder, record: VersionRecord
    ) -> tuple[list[RankCommit], str]:
        ranks = self._session.ranks
        self._session.serving_time.permitted_s(record)
        try:
            # For the commit and, where it fails, for the way back.
            return await ranks.switch(order, 2 * self._timeout_s)
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

    async def _paused(self, plan: CutoverPlan, result: CutoverResult) -> None:
        async with self._session.paused(plan.spec) as pause:
            result.pause_mode, result.pause_s = pause.mode, pause.seconds
            failures = await self._tried(lambda: self._commit(plan.target, result))
            if failures:
                self.at_fault = True
                await self._restore(plan.base, failures)
            await self._go_on(plan, result)
        result.paused_s = time.perf_counter() - pause.began

    async def _paused_together(
        self, plan: CutoverPlan, result: CutoverResult, together: Member
    ) -> None:
        """Do as `_paused` does, in step with others: all serve the target, or none of them."""
        base = plan.base
        async with self._session.paused(plan.spec, together.open_apply(plan)) as pause:
            result.pause_mode, result.pause_s = pause.mode, pause.seconds
            if failures := await together.stand_still():
                await self.resume(base)
                raise _restored(base, failures, at_fault=False)
            failures = await self._tried(lambda: self._commit(plan.target, result))
            self.at_fault = bool(failures)
            if failures := await together.agree(failures):
                await self._restore(base, failures)
            await self._go_on(plan, result)
        result.paused_s = time.perf_counter() - pause.began

    async def _go_on(self, plan: CutoverPlan, result: CutoverResult) -> None:
        start = time.perf_counter()
        await failpoints.reach("apply.resume")
        await self.resume(plan.target)
        result.resume_s = time.perf_counter() - start

    def _refuse_second(self, cause: Cause) -> None:
        if cause.key and self._journal.answered(cause.key) is not None:
            logger.critical("invariant idempotent: a call that was answered is carried out again")
            self._metrics.violate("idempotent")
            raise WeightSyncError(
                Reason.FAULT,
                "this call was answered already, and nothing was done again; repeat it",
            )

    def _bounded(self, plan: CutoverPlan) -> contextlib.AbstractContextManager[None]:
        # Two commits, a fence or as many resumes as are tried, each with a look at the engine.
        longest = self._session.longest_pause_s(plan.spec) + 2 * self._timeout_s
        longest += self._session.longest_resume_s()
        if self._together is not None:
            # Others stand still and are written later.
            longest += self._session.longest_pause_s(plan.spec) + self._timeout_s
            longest += self._together.patience_s
        return self._metrics.bounds.within(f"the pause of apply {plan.target.apply_id}", longest)

    async def _commit(self, target: PreparedVersion, result: CutoverResult) -> list[str]:
        try:
            result.ranks = await self._session.ranks.commit(
                target.apply_id, target.record.version, self._timeout_s
            )
        except WeightSyncError as error:
            if self._session.ranks.hung or error.reason in OUT_OF_REACH:
                # Nobody knows what the ranks hold until that call returns.
                await self._fence([error.message])
            if await self._session.state() is EngineState.SERVING:
                # The lease ran out before the commit came, and nothing was written.
                raise WeightSyncError(
                    Reason.ENGINE_AWAY,
                    "the engine went on with what it served before the commit reached it "
                    f"({error.message}); apply again",
                    retry_after_s=1.0,
                ) from error
            return [error.message]
        self._count(target, result)
        return _failures(result.ranks, target.digest)

    def _count(self, target: PreparedVersion, result: CutoverResult) -> None:
        self._shown.set_served(
            {
                rank.rank: target.record.version if rank.content_digest == target.digest else 0
                for rank in result.ranks
            }
        )
        result.commit_s = max(rank.commit_s for rank in result.ranks)
        result.verify_s = max(rank.verify_s for rank in result.ranks)

    async def _restore(self, base: PreparedVersion, failures: list[str]) -> Never:
        logger.error("apply failed, restoring: %s", "; ".join(failures))
        await failpoints.reach("apply.restore")
        result = CutoverResult()
        again = await self._commit(base, result)
        if again:
            await self._fence(failures + again)
        self.compared_all = result.compared_all
        await failpoints.reach("apply.restored")
        await self.resume(base)
        raise _restored(base, failures, at_fault=self.at_fault)

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
            f"the engine is fenced, it serves nothing: {reason}; the server tries to place the "
            "live version again, else restart vLLM",
        )

    def _observe(self, result: CutoverResult) -> None:
        for phase in ("pause", "commit", "verify", "resume", "paused"):
            self._metrics.observe_phase(phase, getattr(result, f"{phase}_s"))
        self._metrics.add_written(result.written_bytes)
