"""Replies of applies, rollbacks and proofs, from what the ranks said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.pause_options import duration, pause_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightsync.engine import PauseSpec
    from weightsync_server.catalog.serving import EngineServing
    from weightsync_server.catalog.table import VersionTable
    from weightsync_server.engine.journal_file import Entry
    from weightsync_server.engine.outcome import CutoverResult, PreparedVersion
    from weightsync_server.engine.version_loads import LoadScheduler

__all__ = [
    "applied",
    "combined",
    "current_ranks",
    "engine_reports",
    "loading_ranks",
    "nothing_done",
    "planned",
    "proof",
    "proofs",
    "recovered",
    "show_served",
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
            transform_reason=loads.no_plan.cause if loads is not None else "",
            loader=loaders.get(report.rank),
        )
        for report in current.reports
    ]


def show_served(
    status: pb.EngineStatus,
    served: EngineServing,
    table: VersionTable,
    loads: LoadScheduler | None,
) -> None:
    """Add to a status what the engine serves, and what it would go back to.

    Args:
        status: Of the engine.
        served: What it serves.
        table: The versions of the model.
        loads: Has its ranks load versions; None: they do not.
    """
    live, back = table.find(served.live), table.find(served.rollback_to)
    if live is not None:
        status.live_version, status.live_content_digest = live.version, live.content_digest
    if back is not None:
        status.rollback_version = back.version
        status.rollback_resident = back.residency == pb.RESIDENCY_STAGED and (
            loads is None or loads.resident(back.content_digest)
        )


def loading_ranks(loads: LoadScheduler) -> list[pb.RankResult]:
    """Return how far every rank is that is not proved to hold anything yet.

    Args:
        loads: Has the ranks load the engine's own checkpoint.
    """
    return [
        pb.RankResult(
            rank=rank,
            transform=pb.TRANSFORM_TWIN,
            transform_reason=loads.no_plan.cause,
            loader=loader,
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


def engine_reports(
    reports: Mapping[str, pb.ApplyReport], absent: Mapping[str, str]
) -> list[pb.EngineReport]:
    """Return what became of each engine, in the order of their names.

    Args:
        reports: Of those that took part.
        absent: Why the others did not.
    """
    return [
        pb.EngineReport(engine=name, report=reports.get(name), absent=absent.get(name, ""))
        for name in sorted([*reports, *absent])
    ]


def combined(reports: Mapping[str, pb.ApplyReport]) -> pb.ApplyReport:
    """Return one report for engines that took the same version: their sums, and their slowest."""
    all_ = list(reports.values())
    if len(all_) == 1:
        return all_[0]
    first = next((one for one in all_ if one.outcome != pb.APPLY_OUTCOME_ALREADY_LIVE), all_[0])
    report = pb.ApplyReport()
    report.CopyFrom(first)
    del report.ranks[:]
    report.written_bytes = sum(one.written_bytes for one in all_)
    went = [one for one in all_ if one.outcome != pb.APPLY_OUTCOME_ALREADY_LIVE] or all_
    report.previous_version = _common([one.previous_version for one in went])
    if len({one.strategy for one in all_}) > 1:
        report.strategy = pb.APPLY_STRATEGY_UNSPECIFIED
    for phase in pb.PhaseDurations.DESCRIPTOR.fields_by_name:
        slowest = max(getattr(one.phases, phase).ToNanoseconds() for one in all_)
        getattr(report.phases, phase).FromNanoseconds(slowest)
    if report.HasField("plan"):
        report.plan.bytes = sum(one.plan.bytes for one in all_)
        report.plan.rollback_resident = all(one.plan.rollback_resident for one in all_)
        longest = max(one.plan.predicted_pause.ToNanoseconds() for one in all_)
        report.plan.predicted_pause.FromNanoseconds(longest)
    return report


def proofs(
    found: Mapping[str, pb.VerifyVersionResponse], absent: Mapping[str, str]
) -> pb.VerifyVersionResponse:
    """Return one proof for engines that were each asked for one.

    Args:
        found: Theirs.
        absent: Why others were not asked.
    """
    all_ = list(found.values())
    version = _common([one.version for one in all_])
    return pb.VerifyVersionResponse(
        verified=all(one.verified for one in all_),
        version=version,
        content_digest=all_[0].content_digest if version else "",
        ranks=all_[0].ranks if len(all_) == 1 else [],
        engines=[
            pb.EngineProof(engine=name, verified=one.verified, version=one.version, ranks=one.ranks)
            for name, one in found.items()
        ]
        + [pb.EngineProof(engine=name, absent=why) for name, why in absent.items()],
    )


def _common(values: Sequence[int]) -> int:
    """Return the one value; 0: there are several."""
    return values[0] if len(set(values)) == 1 else 0
