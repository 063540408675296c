"""From protobuf messages to the client's types; nothing of protobuf's is left in them."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import types

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.timestamp_pb2 import Timestamp

__all__ = [
    "to_change",
    "to_report",
    "to_rollback",
    "to_status",
    "to_tensor",
    "to_verification",
    "to_version",
]

_E = TypeVar("_E", bound=enum.StrEnum)


def _enum(kind: type[_E], value: int) -> _E:
    # A value of a newer server has no name here.
    try:
        return kind(_NAMES[kind][value])
    except (KeyError, ValueError):
        return kind("unspecified")


def _names(descriptor: object) -> dict[int, str]:
    values = {v.number: v.name for v in descriptor.values}  # type: ignore[attr-defined] # upb's
    prefix = values[0].removesuffix("UNSPECIFIED")
    return {number: name.removeprefix(prefix).lower() for number, name in values.items()}


#: Those of the protocol have the same names.
_NAMES: dict[type[enum.StrEnum], dict[int, str]] = {
    kind: _names(getattr(pb, kind.__name__).DESCRIPTOR)
    for kind in (
        types.ApplyOutcome,
        types.ApplyStrategy,
        types.CacheMode,
        types.Durability,
        types.EngineState,
        types.LayoutCheck,
        types.LiveCheck,
        types.LoaderState,
        types.PauseMode,
        types.PushKind,
        types.Residency,
        types.Serving,
        types.Transform,
    )
}


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _time(timestamp: Timestamp) -> datetime:
    return timestamp.ToDatetime(tzinfo=UTC)


def to_version(m: pb.VersionInfo) -> types.Version:
    """Convert a version."""
    return types.Version(
        model=m.model,
        version=m.version,
        durability=_enum(types.Durability, m.durability),
        residency=_enum(types.Residency, m.residency),
        serving=_enum(types.Serving, m.serving),
        rejected_reason=m.rejected_reason,
        content_digest=m.content_digest,
        manifest_digest=m.manifest_digest,
        layout_digest=m.layout_digest,
        size_bytes=m.size_bytes,
        tensor_count=m.tensor_count,
        shard_count=m.shard_count,
        epoch=m.epoch,
        commit_time=_time(m.commit_time) if m.HasField("commit_time") else None,
        metadata=dict(m.metadata),
        pinned=m.pinned,
        trainer_verified=m.trainer_verified,
        kind=_enum(types.PushKind, m.kind),
        base_version=m.base_version,
        stored_bytes=m.stored_bytes,
        chain_length=m.chain_length,
        changed_fraction=m.changed_fraction,
        layout_check=_enum(types.LayoutCheck, m.layout_check),
        live_check=_enum(types.LiveCheck, m.live_check),
        live_check_time=_time(m.live_check_time) if m.HasField("live_check_time") else None,
    )


def to_tensor(m: pb.TensorInfo) -> types.TensorInfo:
    """Convert a tensor of a version."""
    spec = m.spec
    return types.TensorInfo(
        spec.name, spec.dtype, tuple(spec.shape), m.shard, spec.begin, spec.end, m.digest
    )


def to_change(m: pb.WatchVersionsResponse) -> types.VersionChange:
    """Convert a message of a watch."""
    return types.VersionChange(to_version(m.version), m.revision, m.deleted, m.initial)


def _rank(m: pb.RankResult) -> types.RankResult:
    return types.RankResult(
        m.rank,
        m.version,
        m.content_digest,
        m.written_bytes,
        _seconds(m.commit),
        _seconds(m.verify),
        m.error,
        m.h2d_bytes,
        m.device_room_bytes,
        m.device_used_bytes,
        _enum(types.Transform, m.transform),
        m.transform_reason,
        _loader(m.loader) if m.HasField("loader") else None,
    )


def _loader(m: pb.LoaderStatus) -> types.LoaderStatus:
    return types.LoaderStatus(
        _enum(types.LoaderState, m.state),
        m.version,
        m.percent,
        m.arena_bytes,
        m.restarts,
        m.last_error,
        _seconds(m.load),
    )


def _phases(m: pb.PhaseDurations) -> types.Phases:
    return types.Phases(
        prepare_s=_seconds(m.prepare),
        pause_s=_seconds(m.pause),
        commit_s=_seconds(m.commit),
        verify_s=_seconds(m.verify),
        resume_s=_seconds(m.resume),
        paused_total_s=_seconds(m.paused_total),
    )


def _pause(m: pb.PauseOptions) -> types.PauseUsed:
    return types.PauseUsed(
        mode=_enum(types.PauseMode, m.mode),
        cache=_enum(types.CacheMode, m.cache),
        wait_timeout_s=_seconds(m.wait_timeout),
        after_wait=_enum(types.PauseMode, m.after_wait),
    )


def to_report(m: pb.ApplyReport, engines: Iterable[pb.EngineReport] = ()) -> types.ApplyReport:
    """Convert the report of an apply.

    Args:
        m: Of all engines together, or of one.
        engines: What became of each.
    """
    plan = types.ApplyPlan(
        m.plan.bytes,
        _seconds(m.plan.predicted_pause),
        m.plan.memory_bytes,
        m.plan.read_from_store,
        _enum(types.ApplyStrategy, m.plan.strategy),
        m.plan.rollback_resident,
    )
    return types.ApplyReport(
        apply_id=m.apply_id,
        outcome=_enum(types.ApplyOutcome, m.outcome),
        version=m.version,
        content_digest=m.content_digest,
        previous_version=m.previous_version,
        phases=_phases(m.phases),
        written_bytes=m.written_bytes,
        ranks=tuple(map(_rank, m.ranks)),
        pause=_pause(m.pause),
        plan=plan if m.HasField("plan") else None,
        durability=_enum(types.Durability, m.durability),
        strategy=_enum(types.ApplyStrategy, m.strategy),
        engines=tuple(map(_engine_report, engines)),
    )


def _engine_report(m: pb.EngineReport) -> types.EngineReport:
    return types.EngineReport(
        m.engine, to_report(m.report) if m.HasField("report") else None, m.absent
    )


def to_rollback(m: pb.RollbackResponse) -> types.RollbackReport:
    """Convert the answer to a rollback."""
    return types.RollbackReport(to_report(m.report, m.engines), m.rejected_version)


def to_verification(m: pb.VerifyVersionResponse) -> types.Verification:
    """Convert a proof."""
    return types.Verification(
        m.verified,
        m.version,
        m.content_digest,
        tuple(map(_rank, m.ranks)),
        tuple(map(_proof, m.engines)),
    )


def _proof(m: pb.EngineProof) -> types.EngineProof:
    return types.EngineProof(m.engine, m.verified, m.version, tuple(map(_rank, m.ranks)), m.absent)


def _engine(m: pb.EngineStatus) -> types.EngineStatus:
    return types.EngineStatus(
        state=_enum(types.EngineState, m.state),
        reason=m.reason,
        engine_id=m.engine_id,
        vllm_version=m.vllm_version,
        kind=m.kind,
        ranks=tuple(map(_rank, m.ranks)),
        capabilities=tuple(m.capabilities),
        warnings=tuple(m.warnings),
        name=m.name,
        live_version=m.live_version,
        live_content_digest=m.live_content_digest,
        rollback_version=m.rollback_version,
        rollback_resident=m.rollback_resident,
        apply_id=m.apply_id,
    )


def _slot(m: pb.SlotStatus) -> types.SlotStatus:
    return types.SlotStatus(m.slot, m.version, m.state, m.reserved_bytes, m.used_bytes, m.leases)


def _push(m: pb.PushStatus) -> types.PushStatus:
    return types.PushStatus(
        m.push_id,
        m.version,
        m.received_bytes,
        m.declared_bytes,
        m.streams,
        _enum(types.LayoutCheck, m.layout_check),
        m.writers,
        tuple(m.absent_writers),
        tuple(m.unfinished_writers),
    )


def _model(m: pb.ModelStatus) -> types.ModelStatus:
    return types.ModelStatus(
        model=m.model,
        live_version=m.live_version,
        live_content_digest=m.live_content_digest,
        rollback_version=m.rollback_version,
        rollback_resident=m.rollback_resident,
        newest_version=m.newest_version,
        epoch=m.epoch,
        engine=_engine(m.engine),
        slots=tuple(map(_slot, m.slots)),
        pushes=tuple(map(_push, m.pushes)),
        apply_id=m.apply_id,
        engines=tuple(map(_engine, m.engines)),
        client_runs=tuple(
            types.ClientRun(r.client_run, r.newest_version, r.versions, r.has_epoch)
            for r in m.client_runs
        ),
    )


def _disk(m: pb.DiskStatus) -> types.DiskStatus:
    return types.DiskStatus(m.folder, m.path, m.free_bytes, m.used_bytes, m.error)


def to_status(m: pb.GetStatusResponse) -> types.Status:
    """Convert the state of a server."""
    return types.Status(
        server_version=m.server_version,
        start_time=_time(m.start_time) if m.HasField("start_time") else None,
        models=tuple(map(_model, m.models)),
        memory_reserved_bytes=m.memory_reserved_bytes,
        memory_limit_bytes=m.memory_limit_bytes,
        fetchers=m.fetchers,
        ingest_processes=m.ingest_processes,
        store=m.store,
        durable=m.durable,
        invariant_violations=dict(m.invariant_violations),
        disks=tuple(map(_disk, m.disks)),
    )
