"""What an apply is made of; every other module of this room may import this one."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field

from weightsync.engine import CacheUse, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.catalog.serving import ServingState
from weightsync_server.engine.gate_limits import GateLimits, Scores
from weightsync_server.engine.worker_reports import RankCommit, Report
from weightsync_server.residency.slot import SlotLease

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedVersion:
    """A version that every rank has mapped, matched and digested.

    `lease` keeps its segments; `seconds` is the time that the slowest rank took.
    """

    apply_id: str
    record: VersionRecord
    lease: SlotLease
    reports: tuple[Report, ...]
    seconds: float

    @property
    def digest(self) -> str:
        return self.record.content_digest

    @property
    def bytes(self) -> int:
        """Bytes a commit writes, over all ranks."""
        return sum(report.bytes for report in self.reports)

    def check(self) -> None:
        """Refuse a version of which a rank holds other bytes; the server's own were proved."""
        for report in self.reports:
            if report.unlike:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT,
                    f"rank {report.rank} has different bytes of {', '.join(report.unlike)} on its "
                    "device than the server has in shared memory; apply again, and check the GPU "
                    "if this repeats",
                )

    def check_cache(self, spec: PauseSpec) -> None:
        """Refuse to keep a cache that was written with other scales than the version reads by."""
        for report in self.reports:
            if report.reads_cache_otherwise and spec.cache is not CacheUse.RECOMPUTE:
                raise WeightSyncError(
                    Reason.ENGINE_UNSUPPORTED,
                    f"use pause.cache RECOMPUTE: version {self.record.version} has different "
                    f"scales of the key-value cache than the live version on rank {report.rank}, "
                    "and cached values would be read with the wrong scales",
                )

    @property
    def patched(self) -> bool:
        """Whether every rank would write only what changes."""
        return all(report.patched for report in self.reports)

    @property
    def shadow(self) -> bool:
        """Whether it was loaded beside generation, and is exchanged with what is live."""
        return any(report.transform == "twin" for report in self.reports)


@dataclass
class Pause:
    """Generation stands still: in which mode, after how many seconds, and since when."""

    mode: str
    seconds: float
    began: float


@dataclass(frozen=True)
class ApplyCause:
    """Why an apply is made.

    `request` is the digest of what was asked under the idempotency `key`, empty without one.
    `rejects` is the version that a rollback rejects, 0 without one.
    """

    key: str = ""
    request: str = ""
    rejects: int = 0
    reason: str = ""


@dataclass(frozen=True)
class GatePlan:
    """How the probes of a target are scored on one engine, and what a bad score means.

    Attributes:
        when: BEFORE or AFTER; OFF: they are not, for the reason in `absent`.
        limit_s: Longest time for scoring.
        baseline: What the engine said of them with what is live; None: it was not asked, or did not
            say.
    """

    when: pb.GateWhen.ValueType
    on_fail: pb.GateAction.ValueType
    probes: pb.Probes
    limits: GateLimits
    limit_s: float
    absent: str = ""
    baseline: Scores | None = None


@dataclass(frozen=True)
class CutoverPlan:
    """One apply: every rank holds `base` and shall hold `target`.

    `for_host`: the outcome of this plan alone counts for every engine of this host. `gate` None:
    this engine scores nothing.
    """

    target: PreparedVersion
    base: PreparedVersion
    spec: PauseSpec
    cause: ApplyCause
    for_host: bool = False
    gate: GatePlan | None = None

    @property
    def gated(self) -> bool:
        """Whether nobody may be served by the target before its probes are scored."""
        return self.gate is not None and self.gate.when == pb.GATE_WHEN_BEFORE


def absent_report(plan: CutoverPlan) -> pb.GateReport | None:
    """Return the report of a gate that nobody turned off and that is not there; else None."""
    gate = plan.gate
    if gate is None or not gate.absent:
        return None
    version = plan.target.record.version
    return pb.GateReport(version=version, when=pb.GATE_WHEN_OFF, reason=gate.absent)


@dataclass
class CutoverResult:
    """What one pause did; times in seconds."""

    pause_mode: str = ""
    pause_s: float = 0.0
    commit_s: float = 0.0
    verify_s: float = 0.0
    score_s: float = 0.0
    resume_s: float = 0.0
    paused_s: float = 0.0
    gate: pb.GateReport | None = None
    ranks: list[RankCommit] = field(default_factory=list)

    @property
    def written_bytes(self) -> int:
        return sum(rank.written_bytes for rank in self.ranks)

    @property
    def patched(self) -> bool:
        """Whether every rank wrote only what changes."""
        return all(rank.patched for rank in self.ranks)

    @property
    def compared_all(self) -> bool:
        """Whether every rank compared all that is live with what this server received."""
        return all(rank.compared_all for rank in self.ranks)


async def reject(serving: ServingState, version: int, reason: str) -> bool:
    """Reject a version that the engine left, so that "newest" does not go back to it.

    Returns whether it is rejected, and raises nothing.
    """
    return await _marked(serving.reject(version, reason), version, "rejected")


async def withhold(serving: ServingState, version: int, reason: str) -> bool:
    """Hold a version that its gate did not let go; returns and raises as `reject`."""
    return await _marked(serving.withhold(version, reason), version, "held")


async def _marked(marking: Awaitable[None], version: int, what: str) -> bool:
    try:
        await marking
    except WeightSyncError as error:
        # It may never have been committed, and gone when another version took its place.
        if error.reason is not Reason.VERSION_UNKNOWN:
            # What the engine serves is not less true for it.
            logger.critical("version %d could not be %s: %s", version, what, error.message)
        return False
    return True
