"""Replies of applies, rollbacks and proofs, from what the ranks said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.pause_options import duration, pause_options

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync_server.engine.journal import Entry
    from weightsync_server.engine.outcome import CutoverResult, PreparedVersion
    from weightsync_server.engine.version_loads import LoadScheduler

__all__ = [
    "applied",
    "current_ranks",
    "loading_ranks",
    "nothing_done",
    "planned",
    "proof",
    "recovered",
    "strategy",
]


def strategy(target: PreparedVersion, *, patched: bool) -> pb.ApplyStrategy.ValueType:
    """Return how parameters are written, as replies tell it.

    Args:
        target: What is written.
        patched: Whether only what changes is.
    """
    if target.twin:
        return pb.APPLY_STRATEGY_TWIN
    return pb.APPLY_STRATEGY_PATCH if patched else pb.APPLY_STRATEGY_COPY


def current_ranks(
    current: PreparedVersion, loads: LoadScheduler | None = None
) -> list[pb.RankResult]:
    """Return what every rank was last proved to hold.

    Args:
        current: It.
        loads: Has the ranks load versions; None: they do not, or that is not asked.
    """
    loaders = loads.status() if loads is not None else {}
    return [
        pb.RankResult(
            rank=report.rank,
            version=current.record.version,
            content_digest=current.digest,
            device_room_bytes=report.device.room,
            device_used_bytes=report.device.used,
            transform=_transform(current),
            transform_reason=loads.why if loads is not None else "",
            loader=loaders.get(report.rank),
        )
        for report in current.reports
    ]


def loading_ranks(loads: LoadScheduler) -> list[pb.RankResult]:
    """Return how far every rank is that is not proved to hold anything yet.

    Args:
        loads: Has the ranks load the engine's own checkpoint.
    """
    return [
        pb.RankResult(
            rank=rank, transform=pb.TRANSFORM_TWIN, transform_reason=loads.why, loader=loader
        )
        for rank, loader in loads.status().items()
    ]


def applied(
    target: PreparedVersion, previous: int, spec: PauseSpec, result: CutoverResult
) -> pb.ApplyReport:
    """Return the report of an apply that made `target` live."""
    staged = {report.rank: report.device.sent for report in target.reports}
    return pb.ApplyReport(
        apply_id=target.apply_id,
        outcome=pb.APPLY_OUTCOME_APPLIED,
        version=target.record.version,
        content_digest=target.digest,
        previous_version=previous,
        phases=pb.PhaseDurations(
            prepare=duration(target.seconds),
            pause=duration(result.pause_s),
            commit=duration(result.commit_s),
            verify=duration(result.verify_s),
            resume=duration(result.resume_s),
            paused_total=duration(result.paused_s),
        ),
        written_bytes=result.written_bytes,
        ranks=[
            pb.RankResult(
                rank=rank.rank,
                version=target.record.version,
                content_digest=rank.content_digest,
                written_bytes=rank.written_bytes,
                commit=duration(rank.commit_s),
                verify=duration(rank.verify_s),
                h2d_bytes=staged.get(rank.rank, 0) + rank.device.sent,
                device_room_bytes=rank.device.room,
                device_used_bytes=rank.device.used,
                transform=_transform(target),
            )
            for rank in result.ranks
        ],
        pause=pause_options(spec, result.pause_mode),
        durability=target.record.durability,
        strategy=strategy(target, patched=result.patched),
    )


def recovered(intent: Entry, current: PreparedVersion) -> pb.ApplyReport:
    """Return the report of an apply that was found done; how long it took is not known."""
    return pb.ApplyReport(
        apply_id=intent.apply_id,
        outcome=pb.APPLY_OUTCOME_APPLIED,
        version=current.record.version,
        content_digest=current.digest,
        previous_version=intent.previous,
        ranks=current_ranks(current),
        durability=current.record.durability,
    )


def nothing_done(current: PreparedVersion, spec: PauseSpec) -> pb.ApplyReport:
    """Return the report for a version that is live already."""
    return pb.ApplyReport(
        outcome=pb.APPLY_OUTCOME_ALREADY_LIVE,
        version=current.record.version,
        content_digest=current.digest,
        previous_version=current.record.version,
        ranks=current_ranks(current),
        pause=pause_options(spec),
        durability=current.record.durability,
    )


def planned(
    target: PreparedVersion, live: int, spec: PauseSpec, plan: pb.ApplyPlan
) -> pb.ApplyReport:
    """Return the report of a dry run."""
    return pb.ApplyReport(
        apply_id=target.apply_id,
        outcome=pb.APPLY_OUTCOME_PLANNED,
        version=target.record.version,
        content_digest=target.digest,
        previous_version=live,
        phases=pb.PhaseDurations(prepare=duration(target.seconds)),
        ranks=[
            pb.RankResult(
                rank=report.rank, written_bytes=report.bytes, transform=_transform(target)
            )
            for report in target.reports
        ],
        pause=pause_options(spec),
        plan=plan,
        durability=target.record.durability,
    )


def proof(current: PreparedVersion) -> pb.VerifyVersionResponse:
    """Return the answer to VerifyVersion from reports that compared live parameters."""
    ranks = []
    for report in current.reports:
        names = ", ".join(report.mismatched)
        ranks.append(
            pb.RankResult(
                rank=report.rank,
                version=current.record.version if report.proved else 0,
                content_digest=current.digest if report.proved else "",
                verify=duration(report.seconds),
                error="" if report.proved else report.error or f"differs in {names}",
            )
        )
    return pb.VerifyVersionResponse(
        verified=all(report.proved for report in current.reports),
        version=current.record.version,
        content_digest=current.digest,
        ranks=ranks,
    )


def _transform(version: PreparedVersion) -> pb.Transform.ValueType:
    return pb.TRANSFORM_TWIN if version.twin else pb.TRANSFORM_PLAN
