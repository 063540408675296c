"""One pause: from the last token of the old version to the first of the new one, or of the old one.

INTENT -> pause -> commit + verify on every rank -> all equal? resume on the new version
                                                 -> else: restore the old one, verify, resume
                                                 -> else: fence
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Never

from weightsync import failpoints
from weightsync.engine import EngineState
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.apply.journal import Entry, Journal

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync_server.apply.ranks import RankCommit
    from weightsync_server.apply.session import Pause, Prepared, Session
    from weightsync_server.metrics import Metrics

__all__ = ["Switch", "Switched"]

logger = logging.getLogger(__name__)

#: How often a resume is tried, and how long between two tries, seconds.
_RESUMES, _AGAIN_S = 3, 0.1


@dataclass
class Switched:
    """What one pause did; times in seconds."""

    pause_mode: str = ""
    pause_s: float = 0.0
    commit_s: float = 0.0
    verify_s: float = 0.0
    resume_s: float = 0.0
    paused_s: float = 0.0
    ranks: list[RankCommit] = field(default_factory=list)

    @property
    def written_bytes(self) -> int:
        """Bytes written, over all ranks."""
        return sum(rank.written_bytes for rank in self.ranks)

    @property
    def patched(self) -> bool:
        """Whether every rank wrote only what changes."""
        return all(rank.patched for rank in self.ranks)

    @property
    def compared_all(self) -> bool:
        """Whether every rank compared everything, because it wrote everything."""
        return not any(rank.patched for rank in self.ranks)


def _failures(replies: list[RankCommit], digest: str) -> list[str]:
    return [
        f"rank {reply.rank}: {reply.error or 'proved ' + (reply.content_digest or 'nothing')}"
        for reply in replies
        if reply.error or reply.content_digest != digest
    ]


class Switch:
    """Makes one prepared version live, or puts the old one back.

    Args:
        session: The engine.
        journal: Where INTENT and DONE go.
        metrics: Where the phases go.
        commit_timeout_s: Longest time for the ranks to write and prove; then the engine is fenced.
    """

    def __init__(
        self, session: Session, journal: Journal, metrics: Metrics, commit_timeout_s: float
    ) -> None:
        self._session = session
        self._journal = journal
        self._metrics = metrics
        self._timeout_s = commit_timeout_s

    async def run(self, target: Prepared, base: Prepared | None, spec: PauseSpec) -> Switched:
        """Return when the engine generates on `target`, proved on every rank.

        Raises:
            WeightSyncError: APPLY_RESTORED: the engine generates on `base`, proved on every rank.
                ENGINE_FENCED: the engine stands still, with the reason. ENGINE_AWAY: it is gone.
        """
        result = Switched()
        await failpoints.reach("apply.intent")
        await self._write("INTENT", target, base)
        await failpoints.reach("apply.pause")
        async with self._session.paused(spec) as pause:
            result.pause_mode, result.pause_s = pause.mode, pause.seconds
            await failpoints.reach("apply.commit")
            failures = await self._commit(target, result)
            await failpoints.reach("apply.committed")
            if failures:
                await self._restore(base, pause, failures)
            start = time.monotonic()
            await failpoints.reach("apply.resume")
            await self._resume(pause, target)
            result.resume_s = time.monotonic() - start
        result.paused_s = time.monotonic() - pause.began
        await failpoints.reach("apply.resumed")
        # After the resume, so that no fsync lies in the pause: after a crash in between the ranks
        # themselves are asked what they hold.
        await self._write("DONE", target, base)
        await failpoints.reach("apply.done")
        self._observe(result)
        return result

    async def place(self, target: Prepared) -> None:
        """Commit into an engine that stands still already; the caller resumes it.

        Raises:
            WeightSyncError: ENGINE_FENCED with the reason.
        """
        await self._write("INTENT", target, None)
        failures = await self._commit(target, Switched())
        if failures:
            await self._fence(failures)

    async def record(self, held: Prepared) -> None:
        """Write down what every rank holds, when that is not what the journal says already."""
        last = self._journal.last
        if last is None or (last.event, last.version) != ("DONE", held.record.version):
            await self._write("DONE", held, None)

    async def _commit(self, target: Prepared, result: Switched) -> list[str]:
        try:
            result.ranks = await self._session.ranks.commit(target.apply_id, self._timeout_s)
        except WeightSyncError as error:
            if self._session.ranks.hung or error.reason is Reason.ENGINE_AWAY:
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
        self._metrics.set_served(
            {
                rank.rank: target.record.version if rank.content_digest == target.digest else 0
                for rank in result.ranks
            }
        )
        result.commit_s = max(rank.commit_s for rank in result.ranks)
        result.verify_s = max(rank.verify_s for rank in result.ranks)
        return _failures(result.ranks, target.digest)

    async def _restore(self, base: Prepared | None, pause: Pause, failures: list[str]) -> None:
        logger.error("apply failed, restoring: %s", "; ".join(failures))
        if base is None:
            await self._fence(failures)
        await failpoints.reach("apply.restore")
        again = await self._commit(base, Switched())
        if again:
            await self._fence(failures + again)
        await failpoints.reach("apply.restored")
        await self._resume(pause, base)
        await self.record(base)
        raise WeightSyncError(
            Reason.APPLY_RESTORED,
            f"the apply failed and version {base.record.version} was restored and verified on "
            f"every rank ({'; '.join(failures)}); push the version again or apply another one",
        )

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

    async def _resume(self, pause: Pause, held: Prepared) -> None:
        for _ in range(_RESUMES):
            try:
                await self._session.resume(pause, held)
            except WeightSyncError as error:
                failure = error
            else:
                return
            # The answer may be all that was lost: the engine is asked. It generates only on what
            # every rank holds, and that is this version.
            state = await self._session.state()
            if state is EngineState.SERVING:
                return
            if state is not EngineState.PAUSED:
                break
            await asyncio.sleep(_AGAIN_S)
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            f"every rank holds version {held.record.version}, but the resume was not confirmed "
            f"({failure.message}); GetStatus tells what the engine serves",
            retry_after_s=1.0,
        ) from failure

    async def _write(self, event: str, target: Prepared, base: Prepared | None) -> None:
        version = target.record.version
        live, before = self._journal.live
        if base is not None:
            live, before = base.record.version, before if base.record.version == live else 0
        # A version that is placed again keeps its way back.
        entry = Entry(event, target.apply_id, version, before if version == live else live)
        try:
            await asyncio.to_thread(self._journal.write, entry)
        except OSError as error:
            if event == "INTENT":
                raise WeightSyncError(
                    Reason.DISK_EXHAUSTED,
                    f"the journal cannot be written ({error.strerror}); free the disk of state_dir",
                ) from error
            # The ranks are proved; after a crash they are asked, so the service goes on.
            logger.critical("the journal cannot be written: %s", error)

    def _observe(self, result: Switched) -> None:
        for phase in ("pause", "commit", "verify", "resume", "paused"):
            self._metrics.observe_phase(phase, getattr(result, f"{phase}_s"))
        self._metrics.add_written(result.written_bytes)
