"""Replies of applies, rollbacks and proofs, from what the ranks said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.pause_options import duration, pause_options

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync_server.engine.journal import Entry
    from weightsync_server.engine.outcome import CutoverResult, PreparedVersion

__all__ = [
    "applied",
    "held_ranks",
    "nothing_done",
    "planned",
    "proof",
    "recovered",
    "strategy",
]


def strategy(*, patched: bool) -> pb.ApplyStrategy.ValueType:
    """Return how parameters are written, as replies tell it."""
    return pb.APPLY_STRATEGY_PATCH if patched else pb.APPLY_STRATEGY_COPY


def held_ranks(held: PreparedVersion) -> list[pb.RankResult]:
    """Return what every rank was last proved to hold."""
    return [
        pb.RankResult(
            rank=report.rank,
            version=held.record.version,
            content_digest=held.digest,
            device_room_bytes=report.device.room,
            device_used_bytes=report.device.used,
        )
        for report in held.reports
    ]


def applied(
    target: PreparedVersion, previous: int, spec: PauseSpec, switched: CutoverResult
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
            pause=duration(switched.pause_s),
            commit=duration(switched.commit_s),
            verify=duration(switched.verify_s),
            resume=duration(switched.resume_s),
            paused_total=duration(switched.paused_s),
        ),
        written_bytes=switched.written_bytes,
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
            )
            for rank in switched.ranks
        ],
        pause=pause_options(spec, switched.pause_mode),
        durability=target.record.durability,
        strategy=strategy(patched=switched.patched),
    )


def recovered(intent: Entry, held: PreparedVersion) -> pb.ApplyReport:
    """Return the report of an apply that was found done; how long it took is not known."""
    return pb.ApplyReport(
        apply_id=intent.apply_id,
        outcome=pb.APPLY_OUTCOME_APPLIED,
        version=held.record.version,
        content_digest=held.digest,
        previous_version=intent.previous,
        ranks=held_ranks(held),
        durability=held.record.durability,
    )


def nothing_done(held: PreparedVersion, spec: PauseSpec) -> pb.ApplyReport:
    """Return the report for a version that is live already."""
    return pb.ApplyReport(
        outcome=pb.APPLY_OUTCOME_ALREADY_LIVE,
        version=held.record.version,
        content_digest=held.digest,
        previous_version=held.record.version,
        ranks=held_ranks(held),
        pause=pause_options(spec),
        durability=held.record.durability,
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
            pb.RankResult(rank=report.rank, written_bytes=report.bytes) for report in target.reports
        ],
        pause=pause_options(spec),
        plan=plan,
        durability=target.record.durability,
    )


def proof(held: PreparedVersion) -> pb.VerifyVersionResponse:
    """Return the answer to VerifyVersion from reports that compared live parameters."""
    ranks = []
    for report in held.reports:
        names = ", ".join(report.mismatched)
        ranks.append(
            pb.RankResult(
                rank=report.rank,
                version=held.record.version if report.proved else 0,
                content_digest=held.digest if report.proved else "",
                verify=duration(report.seconds),
                error="" if report.proved else report.error or f"differs in {names}",
            )
        )
    return pb.VerifyVersionResponse(
        verified=all(report.proved for report in held.reports),
        version=held.record.version,
        content_digest=held.digest,
        ranks=ranks,
    )
