"""Applies, rollbacks and proofs of one model, one at a time.

An apply runs in a task that no RPC owns: a caller that goes away changes nothing, and a second call
with the same key joins it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.apply import reports
from weightsync_server.apply.options import duration, pause_spec
from weightsync_server.apply.switch import Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from google.protobuf.message import Message

    from weightsync.engine import PauseSpec
    from weightsync_server.apply.journal import Journal
    from weightsync_server.apply.keeper import Keeper
    from weightsync_server.apply.session import Prepared, Session
    from weightsync_server.metrics import Metrics
    from weightsync_server.settings import Settings
    from weightsync_server.versions import ModelVersions, VersionRecord

__all__ = ["Applier"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Answer = TypeVar("_Answer", pb.ApplyVersionResponse, pb.RollbackResponse)
#: Answers kept for repeated calls.
_ANSWERS = 256
#: Calls that may wait for the engine.
_MAX_WAITING = 32
_MAX_KEY_BYTES, _MAX_REASON_BYTES = 128, 1024
_MAX_PREPARE_S = 3600

_OUTCOMES = {
    pb.APPLY_OUTCOME_APPLIED: "applied",
    pb.APPLY_OUTCOME_ALREADY_LIVE: "already_live",
    pb.APPLY_OUTCOME_PLANNED: "planned",
}
_FAILURES = {Reason.APPLY_RESTORED: "restored", Reason.ENGINE_FENCED: "fenced"}


class Applier:
    """Makes versions live on the engine that a keeper holds.

    Args:
        keeper: Keeps the engine connected and reconciled.
        versions: The versions of the model.
        journal: Where applies are written down.
        metrics: Where they are counted.
        settings: Timeouts.
    """

    def __init__(
        self,
        keeper: Keeper,
        versions: ModelVersions,
        journal: Journal,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._keeper = keeper
        self._versions = versions
        self._journal = journal
        self._metrics = metrics
        self._settings = settings
        # By idempotency key: what was asked, and who answers.
        self._tasks: OrderedDict[str, tuple[Message, asyncio.Task[Any]]] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()
        # Bytes per second of pause in the last apply, by strategy.
        self._rates: dict[int, float] = {}

    async def apply(self, request: pb.ApplyVersionRequest) -> pb.ApplyVersionResponse:
        """Make a version live on every rank, or change nothing.

        Raises:
            WeightSyncError: With the reason; the engine then serves what it served before, unless
                the reason is ENGINE_FENCED or ENGINE_AWAY.
        """
        spec = pause_spec(request.pause)
        _check_prepare_timeout(request)
        return await self._own(
            request.idempotency_key, request, lambda: self._count(self._apply(request, spec))
        )

    async def rollback(self, request: pb.RollbackRequest) -> pb.RollbackResponse:
        """Go back to the previous verified version and reject the one that was left."""
        spec = pause_spec(request.pause)
        if len(request.reason.encode()) > _MAX_REASON_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"reason is over {_MAX_REASON_BYTES} bytes; shorten it"
            )
        return await self._own(
            request.idempotency_key, request, lambda: self._count(self._rollback(request, spec))
        )

    async def verify(self, request: pb.VerifyVersionRequest) -> pb.VerifyVersionResponse:
        """Compare what every rank serves with the digests of a version."""
        return await self._own("", request, lambda: self._verify(request))

    async def _verify(self, request: pb.VerifyVersionRequest) -> pb.VerifyVersionResponse:
        async with self._keeper.exclusive() as session:
            live = _live(session)
            if request.version in (0, live.record.version):
                seen = await session.ranks.verify(live.apply_id, self._settings.prepare_timeout_s)
                found = dataclasses.replace(live, reports=tuple(seen))
            else:
                record = self._versions.get(request.version)
                found = await self._prepare(session, record, compare_live=True)
                found.lease.release()
                await session.hold(live)
            answer = reports.proof(found)
            if found.record is live.record:
                self._keeper.checks.judge(live, found.reports)
            return answer

    async def drain(self) -> None:
        """Wait for applies that are running."""
        while self._running:
            await asyncio.wait(self._running)

    async def _own(
        self, key: str, request: Message, start: Callable[[], Coroutine[None, None, _T]]
    ) -> _T:
        known = self._known(key, request)
        if known is None and len(self._running) >= _MAX_WAITING:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                f"{_MAX_WAITING} calls wait for the engine already; wait for them",
                retry_after_s=1.0,
            )
        task: asyncio.Task[_T] = known or asyncio.create_task(start())
        if known is None:
            self._running.add(task)
            task.add_done_callback(functools.partial(self._ended, key))
            if key:
                self._tasks[key] = (request, task)
                while len(self._tasks) > _ANSWERS:
                    self._tasks.popitem(last=False)
        # Shielded: the caller may go away, the apply goes on.
        return await asyncio.shield(task)

    def _known(self, key: str, request: Message) -> asyncio.Task[Any] | None:
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"idempotency_key is over {_MAX_KEY_BYTES} bytes"
            )
        first, task = self._tasks.get(key, (None, None))
        if first is not None and first != request:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "idempotency_key belongs to another request; use a key once, or repeat its request",
            )
        return task

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        # A refusal changed nothing: the same call may do better later.
        keep = error is None or getattr(error, "reason", None) is Reason.APPLY_RESTORED
        if key in self._tasks and self._tasks[key][1] is task and not keep:
            del self._tasks[key]

    async def _count(self, work: Coroutine[None, None, _Answer]) -> _Answer:
        try:
            answer = await work
        except WeightSyncError as error:
            # Only an apply that was begun can have fenced the engine.
            begun = "apply_id" in error.metadata
            self._metrics.count_apply(
                _FAILURES.get(error.reason, "refused") if begun else "refused"
            )
            raise
        record = self._versions.find(answer.report.version)
        if record is not None:
            answer.report.durability = record.durability
        self._metrics.count_apply(_OUTCOMES[answer.report.outcome])
        return answer

    async def _apply(
        self, request: pb.ApplyVersionRequest, spec: PauseSpec
    ) -> pb.ApplyVersionResponse:
        async with self._keeper.exclusive() as session:
            live = _live(session)
            record = self._choose(request, live)
            if record.version == live.record.version:
                return pb.ApplyVersionResponse(report=reports.nothing_done(live, spec))
            absent = record.residency != pb.RESIDENCY_STAGED
            timeout = request.prepare_timeout.ToNanoseconds() / 1e9
            durable = request.require_durable or not request.HasField("require_durable")
            target = await self._ready(session, live, record, timeout, durable=durable)
            if request.dry_run:
                plan = self._plan(target, read_from_store=absent)
                await self._drop(session, live, target)
                report = reports.planned(target, live.record.version, spec, plan)
                return pb.ApplyVersionResponse(report=report)
            if request.clear_rejected:
                await self._versions.clear_rejected(record.version)
            report = await self._make_live(session, live, target, spec)
            return pb.ApplyVersionResponse(report=report)

    async def _rollback(self, request: pb.RollbackRequest, spec: PauseSpec) -> pb.RollbackResponse:
        async with self._keeper.exclusive() as session:
            live = _live(session)
            version = self._versions.rollback_to
            if not version:
                raise WeightSyncError(
                    Reason.NO_ROLLBACK,
                    f"there is no version before {live.record.version} to go back to; "
                    "push the weights that you want as a new version",
                )
            left = live.record.version
            target = await self._ready(session, live, self._versions.get(version), None)
            report = await self._make_live(session, live, target, spec)
            reason = request.reason or f"rolled back to version {version}"
            rejected = await self._reject(left, reason)
            return pb.RollbackResponse(report=report, rejected_version=left if rejected else 0)

    def _choose(self, request: pb.ApplyVersionRequest, live: Prepared) -> VersionRecord:
        if not request.version:
            record = self._versions.newest_applicable()
            return record if record.version > live.record.version else live.record
        record = self._versions.get(request.version)
        if record.serving == pb.SERVING_REJECTED and not request.clear_rejected:
            raise WeightSyncError(
                Reason.VERSION_REJECTED,
                f"version {record.version} is rejected ({record.rejected_reason}); "
                "set clear_rejected to apply it all the same",
            )
        if record.version < live.record.version:
            back = self._versions.rollback_to
            rollback = f"use Rollback, which goes to version {back}, or " if back else ""
            raise WeightSyncError(
                Reason.VERSION_BELOW_LIVE,
                f"version {record.version} is below the live version {live.record.version}; "
                f"{rollback}push its weights as a new version",
            )
        return record

    async def _ready(
        self,
        session: Session,
        live: Prepared,
        record: VersionRecord,
        timeout_s: float | None,
        *,
        durable: bool = True,
    ) -> Prepared:
        await failpoints.reach("apply.begin")
        # In this order: the ranks' own targets then come from bytes that are proved afterwards.
        target = await self._prepare(
            session, record, compare_live=False, timeout_s=timeout_s, durable=durable
        )
        try:
            await self._versions.verify_staged(target.lease)
        except BaseException:
            await self._drop(session, live, target)
            raise
        self._metrics.observe_phase("prepare", target.seconds)
        return target

    async def _prepare(
        self,
        session: Session,
        record: VersionRecord,
        *,
        compare_live: bool,
        timeout_s: float | None = None,
        durable: bool = True,
    ) -> Prepared:
        seconds = timeout_s or self._settings.prepare_timeout_s
        lease = await self._versions.stage(record.version, seconds, durable=durable)
        try:
            return await session.prepare(
                record,
                lease,
                compare_live=compare_live,
                timeout_s=seconds,
                patch=not compare_live,
            )
        except BaseException:
            lease.release()
            raise

    async def _drop(self, session: Session, live: Prepared, target: Prepared) -> None:
        target.lease.release()
        await session.hold(live)

    async def _make_live(
        self, session: Session, live: Prepared, target: Prepared, spec: PauseSpec
    ) -> pb.ApplyReport:
        switch = Switch(session, self._journal, self._metrics, self._settings.commit_timeout_s)
        try:
            await failpoints.reach("apply.prepared")
            switched = await switch.run(target, live, spec)
        except BaseException as error:
            target.lease.release()
            if isinstance(error, WeightSyncError):
                await self._failed(session, live, target, error)
            raise
        self._versions.set_live(target.record.version)
        await session.hold(target)
        self._keeper.show(target, whole=switched.compared_all)
        if switched.paused_s:
            done = reports.strategy(patched=switched.patched)
            self._rates[done] = switched.written_bytes / switched.paused_s
        logger.info(
            "version %d is live, %d bytes written, paused for %.1f ms",
            target.record.version,
            switched.written_bytes,
            switched.paused_s * 1e3,
        )
        return reports.applied(target, live.record.version, spec, switched)

    async def _failed(
        self, session: Session, live: Prepared, target: Prepared, error: WeightSyncError
    ) -> None:
        error.metadata["apply_id"] = target.apply_id
        if error.reason is Reason.APPLY_RESTORED:
            self._keeper.show(live, whole=True)
            await self._reject(target.record.version, error.message)
        if error.reason not in (Reason.ENGINE_FENCED, Reason.ENGINE_AWAY):
            await session.hold(live)

    async def _reject(self, version: int, reason: str) -> bool:
        if self._versions.find(version) is None:
            # It was never committed, and went when another version took its place.
            return False
        try:
            await self._versions.set_rejected(version, reason)
        except WeightSyncError as error:
            # What the engine serves is not less true for it.
            logger.critical("version %d could not be rejected: %s", version, error.message)
            return False
        return True

    def _plan(self, target: Prepared, *, read_from_store: bool) -> pb.ApplyPlan:
        strategy = reports.strategy(patched=target.patched)
        rate = self._rates.get(strategy)
        return pb.ApplyPlan(
            bytes=target.bytes,
            predicted_pause=duration(target.bytes / rate if rate else 0.0),
            memory_bytes=sum(segment.capacity for segment in target.lease.segments),
            read_from_store=read_from_store,
            strategy=strategy,
        )


def _check_prepare_timeout(request: pb.ApplyVersionRequest) -> None:
    seconds = request.prepare_timeout.ToNanoseconds() / 1e9
    if not 0 <= seconds <= _MAX_PREPARE_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"prepare_timeout must be 0 to {_MAX_PREPARE_S} s"
        )


def _live(session: Session) -> Prepared:
    if session.live is None:
        raise WeightSyncError(
            Reason.ENGINE_AWAY,
            "the engine is being reconciled; try again in a moment",
            retry_after_s=1.0,
        )
    return session.live
