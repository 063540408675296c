"""What an apply is made of: a prepared version, a pause, the plan of a cutover and its result.

Every other module of this room may import this one; of them it names only what ranks report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.worker_reports import RankCommit, Report
    from weightsync_server.residency.leases import SlotLease

__all__ = ["Cause", "CutoverPlan", "CutoverResult", "Pause", "PreparedVersion"]


@dataclass(frozen=True)
class PreparedVersion:
    """A version that every rank has mapped, matched and digested.

    Attributes:
        apply_id: Names it in worker RPCs.
        record: The version.
        lease: Keeps its segments.
        reports: One per rank.
        seconds: Time the slowest rank took.
    """

    apply_id: str
    record: VersionRecord
    lease: SlotLease
    reports: tuple[Report, ...]
    seconds: float

    @property
    def digest(self) -> str:
        """Content digest that every rank must prove."""
        return self.record.content_digest

    @property
    def bytes(self) -> int:
        """Bytes a commit writes, over all ranks."""
        return sum(report.bytes for report in self.reports)

    def check(self) -> None:
        """Refuse a version of which a rank holds other bytes; the server's own were proved.

        Raises:
            WeightSyncError: DATA_CORRUPT, naming rank and tensors.
        """
        for report in self.reports:
            if report.unlike:
                raise WeightSyncError(
                    Reason.DATA_CORRUPT,
                    f"rank {report.rank} has other bytes of {', '.join(report.unlike)} on its "
                    "device than the server in shared memory; apply again, and have a look at the "
                    "GPU if it stays so",
                )

    def check_cache(self, spec: PauseSpec) -> None:
        """Refuse to keep a cache that the version reads by other scales than it was written with.

        Raises:
            WeightSyncError: ENGINE_UNSUPPORTED, naming rank and remedy.
        """
        for report in self.reports:
            if report.reads_cache_otherwise and not spec.clear_cache:
                raise WeightSyncError(
                    Reason.ENGINE_UNSUPPORTED,
                    f"use pause.cache RECOMPUTE: version {self.record.version} has other scales of "
                    f"the key-value cache than what is live on rank {report.rank}, and what was "
                    "cached by those would be read by its own",
                )

    @property
    def patched(self) -> bool:
        """Whether every rank would write only what changes."""
        return all(report.patched for report in self.reports)

    @property
    def twin(self) -> bool:
        """Whether it was loaded beside generation, and is exchanged with what is live."""
        return any(report.transform == "twin" for report in self.reports)


@dataclass
class Pause:
    """Generation stands still: in which mode, after how many seconds, and since when."""

    mode: str
    seconds: float
    began: float


@dataclass(frozen=True)
class Cause:
    """Why an apply is made.

    Attributes:
        key: Idempotency key of the call; empty: it had none.
        request: Digest of what was asked under that key.
        rejects: The version that a rollback leaves and rejects; 0: it is no rollback.
        reason: Why that version is rejected.
    """

    key: str = ""
    request: str = ""
    rejects: int = 0
    reason: str = ""


@dataclass(frozen=True)
class CutoverPlan:
    """One apply.

    Attributes:
        target: What every rank shall hold.
        base: What every rank holds.
        spec: How to pause.
        cause: Who asked.
        for_host: Whether what becomes of it alone counts for every engine of this host.
    """

    target: PreparedVersion
    base: PreparedVersion
    spec: PauseSpec
    cause: Cause
    for_host: bool = False


@dataclass
class CutoverResult:
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
        """Whether every rank compared all that is live with what this server received."""
        return all(rank.compared_all for rank in self.ranks)
