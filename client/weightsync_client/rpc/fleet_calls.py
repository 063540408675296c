"""The calls about a whole fleet, as data; see `calls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import fleet_types as types
from weightsync_client.errors import refuse
from weightsync_client.rpc.calls import Call, made_key, most_unavailable, pause_options
from weightsync_client.rpc.validate import flag, seconds, text, whole_number

if TYPE_CHECKING:
    from weightsync_client.options import FleetApplyOptions, FleetChoices, Timeouts

__all__ = ["fleet_abort", "fleet_apply", "fleet_rollback", "fleet_status"]

_ORDERS = {
    types.FleetOrder.BARRIER: pb.ENGINE_ORDER_TOGETHER,
    types.FleetOrder.ROLLING: pb.ENGINE_ORDER_ROLLING,
}


def fleet_apply(
    model: str, version: int, options: FleetApplyOptions, timeouts: Timeouts
) -> Call[types.FleetReport]:
    """Make a version live on every member."""
    request = pb.ApplyVersionRequest(
        model=model,
        version=whole_number("version", version),
        clear_rejected=flag("clear_rejected", options.get("clear_rejected") or False),
        **_chosen(options),
    )
    return Call("ApplyVersion", request, _timeout_s(options, timeouts), lambda m: _report(m.fleet))


def fleet_rollback(
    model: str, reason: str, options: FleetChoices, timeouts: Timeouts
) -> Call[types.FleetReport]:
    """Go back on every member."""
    request = pb.RollbackRequest(
        model=model,
        reason=text("reason", reason),
        **_chosen(options),
    )
    return Call("Rollback", request, _timeout_s(options, timeouts), lambda m: _report(m.fleet))


def fleet_abort(model: str, reason: str, timeouts: Timeouts) -> Call[types.FleetReport | None]:
    """End the apply that runs."""
    request = pb.AbortFleetApplyRequest(model=model, reason=text("reason", reason))
    return Call(
        "AbortFleetApply",
        request,
        timeouts.call_s,
        lambda m: _report(m.fleet) if m.HasField("fleet") else None,
    )


def fleet_status(model: str, timeouts: Timeouts) -> Call[types.FleetStatus]:
    """Ask for the state of the fleet."""
    request = pb.GetFleetStatusRequest(model=model)
    return Call("GetFleetStatus", request, timeouts.call_s, _status)


def _chosen(options: FleetChoices) -> dict[str, Any]:
    """Return what an apply and a rollback of a fleet have in common."""
    pause = pause_options(options)
    return {
        "idempotency_key": made_key(options.get("idempotency_key")),
        # An older server refuses any: where nothing is chosen there is none.
        "pause": pause if pause.ListFields() else None,
        "order": _order(options),
        "max_unavailable": most_unavailable(options.get("max_unavailable", 0)),
        "scope": pb.SCOPE_FLEET,
    }


def _timeout_s(options: FleetChoices, timeouts: Timeouts) -> float:
    return seconds("timeout_s", options.get("timeout_s", timeouts.apply_s))


def _order(options: FleetChoices) -> pb.EngineOrder.ValueType:
    order = options.get("order", types.FleetOrder.ROLLING)
    if order not in _ORDERS:
        raise refuse(
            Reason.REQUEST_INVALID,
            f"order is {str(order)!r}; use one of {', '.join(types.FleetOrder)}",
        )
    return _ORDERS[types.FleetOrder(order)]


def _report(m: pb.FleetReport) -> types.FleetReport:
    return types.FleetReport(
        apply=m.apply,
        version=m.version,
        content_digest=m.content_digest,
        decision=m.decision,
        reason=m.reason,
        order=types.FleetOrder(m.order),
        decisions=m.decisions,
        decisions_needed=m.decisions_needed,
        members=tuple(
            types.FleetMemberReport(
                one.name, one.wave, one.prepared, one.ready, one.done, one.reason
            )
            for one in m.members
        ),
        rollback_reason=m.rollback_reason,
        fenced_others=tuple(m.fenced_others),
    )


def _status(m: pb.GetFleetStatusResponse) -> types.FleetStatus:
    return types.FleetStatus(
        fleet=m.fleet,
        register=m.register,
        member=m.member,
        members=tuple(
            types.FleetMemberStatus(
                one.name,
                one.address,
                one.live_version,
                one.content_digest,
                one.state,
                one.release,
                one.older,
                one.reason,
            )
            for one in m.members
        ),
        newest=_report(m.newest) if m.HasField("newest") else None,
        decided_version=m.decided_version,
        decided_digest=m.decided_digest,
        skew=m.skew,
        undecided=m.undecided,
        read_age_s=m.read_age.ToNanoseconds() / 1e9 if m.HasField("read_age") else None,
    )
