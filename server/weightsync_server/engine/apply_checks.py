"""Refuses applies that cannot be done as they are asked for, before anything is begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.engine import BETWEEN_STEPS
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.engine_applier import check_capable
from weightsync_server.engine.refusals import of_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.engine import PauseSpec
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.engine_group import EngineGroup, GroupMember
    from weightsync_server.engine.idempotency import Request

__all__ = [
    "check_base",
    "check_members",
    "check_order",
    "check_prepare_timeout",
    "check_rolling_slots",
    "check_ways",
]

_MAX_PREPARE_S = 3600
#: Slots that a rolling apply needs: what is left stays staged for those that must go back.
_ROLLING_SLOTS = 3


def check_base(base: VersionRecord, members: Sequence[GroupMember]) -> None:
    """Refuse to replace anything else by a version that kept tensors of what was live.

    Args:
        base: Of which it kept them.
        members: The engines.

    Raises:
        WeightSyncError: VERSION_CONFLICT.
    """
    for one in members:
        live = one.live.record
        if live.content_digest != base.content_digest:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"send the update again: version {live.version} is live on engine {one.name}, and "
                f"the tensors that this update lacks would be those of version {base.version}",
            )


def check_order(request: Request, slots: int) -> None:
    """Refuse an order that is none, or that this server cannot keep.

    Args:
        request: An apply or a rollback.
        slots: How many versions memory holds at once.
    """
    rolling = request.order == pb.ENGINE_ORDER_ROLLING
    if request.order not in pb.EngineOrder.values():
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "order must be TOGETHER or ROLLING; leave it out for TOGETHER",
        )
    if request.max_unavailable and not rolling:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "max_unavailable goes with order ROLLING; leave it out, or set the order",
        )
    if rolling:
        check_rolling_slots(slots)


def check_rolling_slots(slots: int) -> None:
    """Refuse to go from engine to engine where memory does not hold the way back."""
    if slots < _ROLLING_SLOTS:
        raise WeightSyncError(
            Reason.NO_SLOT,
            f"a rolling apply needs {_ROLLING_SLOTS} slots, for what is left stays staged, and "
            f"this server has {slots}; start it with --slots {_ROLLING_SLOTS}, or use TOGETHER",
        )


def check_ways(
    request: Request,
    group: EngineGroup,
    members: Sequence[GroupMember],
    spec: PauseSpec,
) -> None:
    """Refuse what the engines that are taken cannot do in this way."""
    rolling = request.order == pb.ENGINE_ORDER_ROLLING
    fences = group.whole and not rolling and spec.mode != BETWEEN_STEPS
    check_members(members, spec, fences=fences)
    if spec.mode == BETWEEN_STEPS and len(members) > 1 and not rolling:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "engines that change between two steps cannot wait for each other; use order "
            "ROLLING, or another pause mode",
        )


def check_members(members: Sequence[GroupMember], spec: PauseSpec, *, fences: bool) -> None:
    """Refuse a way to pause that an engine does not know.

    Args:
        members: The engines.
        spec: How they would pause.
        fences: Whether each must be fenced where its pause runs out before others have decided.
    """
    for one in members:
        check_capable(one.session, spec)
        if fences:
            _check_fences(one)


def _check_fences(member: GroupMember) -> None:
    try:
        member.session.check_fences()
    except WeightSyncError as error:
        raise of_engine(member.name, error) from None


def check_prepare_timeout(request: pb.ApplyVersionRequest) -> None:
    """Refuse a time that is none."""
    seconds = request.prepare_timeout.ToNanoseconds() / 1e9
    if not 0 <= seconds <= _MAX_PREPARE_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"prepare_timeout must be 0 to {_MAX_PREPARE_S} s"
        )
