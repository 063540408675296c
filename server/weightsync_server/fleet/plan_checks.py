"""What is asked of the register before a plan is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.engine import BETWEEN_STEPS
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.local_numbers import FIRST_LOCAL
from weightsync_server.fleet.fleet_plan import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.engine import PauseSpec
    from weightsync_server.fleet.fleet_history import History
    from weightsync_server.fleet.fleet_plan import FleetVersion

__all__ = ["check_new", "check_pause", "planned_with", "previous_of", "rollback_target"]

#: Of the time for which a barrier's members may stand still without a decision: what requests in
#: flight may take of it, so that every member comes to be ready before the apply is called off.
_WAITING = 0.25


def check_pause(kind: Kind, pause: PauseSpec | None, undecided_s: float) -> None:
    """Refuse a way to pause in which a barrier cannot be made.

    Args:
        kind: Barrier or rolling.
        pause: How members would pause; None: nobody chose.
        undecided_s: As in `FleetLimits`.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if pause is None or kind is not Kind.BARRIER:
        return
    if pause.mode == BETWEEN_STEPS:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "members that change between two steps do not stand still for one decision; use order "
            "ROLLING, or another pause mode",
        )
    longest_s = _WAITING * undecided_s
    if pause.mode == "wait" and pause.wait_timeout_s > longest_s:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"a barrier whose members stand still for {undecided_s:g} s at most cannot wait "
            f"{pause.wait_timeout_s:g} s for requests to finish; give pause.wait_timeout up to "
            f"{longest_s:g} s, use order ROLLING, or raise undecided_limit_s",
        )


def check_new(history: History, target: FleetVersion, *, clears: bool = False) -> None:
    """Refuse a version that a fleet may not go to by an apply.

    Args:
        history: Of the fleet.
        target: The version.
        clears: Whether its content is to be accepted again, if it was rejected.

    Raises:
        WeightSyncError: VERSION_REJECTED, VERSION_CONFLICT, VERSION_BELOW_LIVE.
    """
    if not clears and target.digest in history.rejects:
        raise WeightSyncError(
            Reason.VERSION_REJECTED,
            f"the content of version {target.number} was rejected by a rollback of the fleet; "
            "apply another, or set clear_rejected to have the fleet accept it again",
        )
    live = history.target
    if not history.commits or live is None:
        return
    same = live == target and live.number == target.number
    if same or live.number >= FIRST_LOCAL:
        # Content of one checkpoint alone counts as older than every other.
        return
    if live.number == target.number:
        raise WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"version {target.number} is live in the fleet with other content; give the new one "
            "another number",
        )
    if target.number < live.number:
        raise WeightSyncError(
            Reason.VERSION_BELOW_LIVE,
            f"version {live.number} is live in the fleet, above {target.number}; roll back instead",
        )


def planned_with(history: History, key: str, target: FleetVersion | None) -> int:
    """Return the number of the apply that a call with an idempotency key has planned; 0: none.

    Args:
        history: Of the fleet; what it has forgotten may be planned anew.
        key: The key; "": none.
        target: What is asked for; None: a rollback.

    Raises:
        WeightSyncError: VERSION_CONFLICT: the key stands for something else.
    """
    found = [one.plan for one in history.applies if key and one.plan.key == key]
    if not found:
        return 0
    (plan,) = found[-1:]
    same = bool(plan.rejects)
    if target is not None:
        same = plan.target == target and plan.target.number == target.number and not same
    if not same:
        raise WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"apply {plan.number} of the fleet was made with this idempotency key and is another "
            "one; use a key for one call only",
        )
    return plan.number


def previous_of(
    history: History, present: Mapping[str, FleetVersion | None], kind: Kind
) -> FleetVersion | None:
    """Return what an abort leads back to.

    Raises:
        WeightSyncError: NO_ROLLBACK: a rolling apply would have no way back.
    """
    if history.target is not None:
        return history.target
    live = set(present.values())
    if len(live) == 1:
        return live.pop()
    if kind is Kind.ROLLING:
        raise WeightSyncError(
            Reason.NO_ROLLBACK,
            "the members serve different versions, and nothing was decided for this fleet yet, so "
            "that a failed wave could not go back; make the first apply a barrier",
        )
    return None


def _check_readable(history: History, number: int) -> None:
    """Refuse to go back past a commit that cannot be read."""
    if hidden := [one for one in history.hidden if one > number]:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"apply {hidden[-1]} of the fleet is of a newer release, and its version may be the "
            "one to go back to; ask a member of that release",
        )


def rollback_target(history: History) -> tuple[FleetVersion, FleetVersion]:
    """Return the version of the newest COMMIT before the live one, and the live one.

    Raises:
        WeightSyncError: NO_ROLLBACK. NOT_SUPPORTED: a commit between cannot be read.
    """
    commits = [one.plan for one in history.commits]
    if commits:
        live = commits[-1].target
        before = [(plan.target, plan.number) for plan in commits[:-1]]
        if commits[0].previous is not None:
            before.insert(0, (commits[0].previous, 0))
        for version, number in reversed(before):
            other = version.digest != live.digest
            if other and version.digest not in history.rejects:
                _check_readable(history, number)
                return version, live
    raise WeightSyncError(
        Reason.NO_ROLLBACK,
        "no version was decided before the one that is live and not rejected; apply a newer one",
    )
