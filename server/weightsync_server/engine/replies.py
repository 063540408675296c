"""Replies of applies, rollbacks and proofs, from what the ranks said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.engine import PauseSpec
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.journal import Entry
from weightsync_server.engine.outcome import (
    CutoverPlan,
    CutoverResult,
    PreparedVersion,
    absent_report,
)
from weightsync_server.engine.refusals import duration, pause_options
from weightsync_server.engine.version_loads import LoadScheduler


def strategy(target: PreparedVersion, *, patched: bool) -> pb.ApplyStrategy.ValueType:
    if target.shadow:
        return pb.APPLY_STRATEGY_TWIN
    return pb.APPLY_STRATEGY_PATCH if patched else pb.APPLY_STRATEGY_COPY


def current_ranks(
    current: PreparedVersion | None, loads: LoadScheduler | None = None
) -> list[pb.RankResult]:
    """Return what ranks hold, or how far they are that are not proved to hold anything yet."""
    loaders = loads.status() if loads is not None else {}
    why = loads.no_plan.cause if loads is not None else ""
    if current is None:
        return [
            pb.RankResult(
                rank=rank, transform=pb.TRANSFORM_TWIN, transform_reason=why, loader=loader
            )
            for rank, loader in loaders.items()
        ]
    return [
        pb.RankResult(
            rank=report.rank,
            version=current.record.version,
            content_digest=current.digest,
            device_room_bytes=report.device.room,
            device_used_bytes=report.device.used,
            transform=_transform(current),
            transform_reason=why,
            loader=loaders.get(report.rank),
        )
        for report in current.reports
    ]


def applied(plan: CutoverPlan, result: CutoverResult) -> pb.ApplyReport:
    target = plan.target
    staged = {report.rank: report.device.sent for report in target.reports}
    return pb.ApplyReport(
        apply_id=target.apply_id,
        outcome=pb.APPLY_OUTCOME_APPLIED,
        version=target.record.version,
        content_digest=target.digest,
        previous_version=plan.base.record.version,
        phases=pb.PhaseDurations(
            prepare=duration(target.seconds),
            pause=duration(result.pause_s),
            commit=duration(result.commit_s),
            verify=duration(result.verify_s),
            score=duration(result.score_s) if result.score_s else None,
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
        pause=pause_options(plan.spec, result.pause_mode),
        durability=target.record.durability,
        strategy=strategy(target, patched=result.patched),
        gate=result.gate or absent_report(plan),
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
    return pb.ApplyReport(
        outcome=pb.APPLY_OUTCOME_ALREADY_LIVE,
        version=current.record.version,
        content_digest=current.digest,
        previous_version=current.record.version,
        ranks=current_ranks(current),
        pause=pause_options(spec),
        durability=current.record.durability,
    )


def planned(plan: CutoverPlan, predicted: pb.ApplyPlan) -> pb.ApplyReport:
    target = plan.target
    return pb.ApplyReport(
        apply_id=target.apply_id,
        outcome=pb.APPLY_OUTCOME_PLANNED,
        version=target.record.version,
        content_digest=target.digest,
        previous_version=plan.base.record.version,
        phases=pb.PhaseDurations(prepare=duration(target.seconds)),
        ranks=[
            pb.RankResult(
                rank=report.rank, written_bytes=report.bytes, transform=_transform(target)
            )
            for report in target.reports
        ],
        pause=pause_options(plan.spec),
        plan=predicted,
        durability=target.record.durability,
    )


def proof(current: PreparedVersion) -> pb.VerifyVersionResponse:
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
    return pb.TRANSFORM_TWIN if version.shadow else pb.TRANSFORM_PLAN


def engine_reports(
    reports: Mapping[str, pb.ApplyReport], absent: Mapping[str, str]
) -> list[pb.EngineReport]:
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
    # Of several that score the one that shows most.
    gates = [one.gate for one in all_ if one.HasField("gate")]
    if gates:
        report.gate.CopyFrom(max(gates, key=lambda one: (bool(one.reason), one.k3)))
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
    found: Mapping[str, pb.VerifyVersionResponse],
    absent: Mapping[str, str],
    gates: Mapping[str, pb.GateReport],
) -> pb.VerifyVersionResponse:
    """Return one proof for several engines; `absent` says why the others were not asked."""
    all_ = list(found.values())
    version = _common([one.version for one in all_])
    return pb.VerifyVersionResponse(
        verified=all(one.verified for one in all_),
        version=version,
        content_digest=all_[0].content_digest if version else "",
        ranks=all_[0].ranks if len(all_) == 1 else [],
        engines=[
            pb.EngineProof(
                engine=name,
                verified=one.verified,
                version=one.version,
                ranks=one.ranks,
                gate=gates.get(name),
            )
            for name, one in found.items()
        ]
        + [pb.EngineProof(engine=name, absent=why) for name, why in absent.items()],
    )


def _common(values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else 0
