"""What is asked of the register before a plan is written."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.engine import BETWEEN_STEPS, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.record import FIRST_LOCAL
from weightsync_server.decide import ApplyOrder, FleetVersion
from weightsync_server.fleet.fleet_history import History

#: Of the time for which a barrier's members may stand still without a decision: what requests in
#: flight may take of it, so that every member comes to be ready before the apply is called off.
_WAITING = 0.25


def check_pause(kind: ApplyOrder, pause: PauseSpec | None, undecided_s: float) -> None:
    """Refuse a way to pause in which a barrier cannot be made; None: no way was chosen."""
    if pause is None or kind is not ApplyOrder.BARRIER:
        return
    if pause.mode == BETWEEN_STEPS:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            "use order ROLLING, or another pause mode: members that change weights between two "
            "steps do not pause for one decision",
        )
    longest_s = _WAITING * undecided_s
    if pause.mode == "wait" and pause.wait_timeout_s > longest_s:
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"a barrier whose members stay paused for at most {undecided_s:g} s cannot wait "
            f"{pause.wait_timeout_s:g} s for requests to finish; give pause.wait_timeout up to "
            f"{longest_s:g} s, use order ROLLING, or raise undecided_limit_s",
        )


def check_new(history: History, target: FleetVersion, *, clears: bool = False) -> None:
    """Refuse a version that a fleet may not go to by an apply.

    With `clears`, content that was rejected is allowed.
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
    """Return the number of the apply planned with an idempotency key, or 0.

    An empty `key` finds none. A `target` of None asks for a rollback. Raises VERSION_CONFLICT when
    the key was used for another call.
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
    history: History, present: Mapping[str, FleetVersion | None], kind: ApplyOrder
) -> FleetVersion | None:
    """Return what an abort leads back to; refuse a rolling apply without a way back."""
    if history.target is not None and not history.unreadable:
        return history.target
    live = set(present.values())
    if len(live) == 1 and None not in live:
        return live.pop()
    if history.unreadable:
        raise WeightSyncError(
            Reason.DATA_CORRUPT,
            "the members hold different versions or do not report one, so a failed apply would "
            "have no version to return to; restore what is damaged first or, if it is lost, stop "
            f"the servers of all versions but one and apply again: {history.unreadable}",
        )
    if kind is ApplyOrder.ROLLING:
        raise WeightSyncError(
            Reason.NO_ROLLBACK,
            "make the first apply a barrier: nothing was decided for this fleet yet, and its "
            "members serve different versions or do not report one, so a failed wave would have "
            "no version to return to",
        )
    return None


def _check_readable(history: History, number: int) -> None:
    if hidden := [one for one in history.hidden if one > number]:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"ask a member of a newer release, or apply the version that is wanted: apply "
            f"{hidden[-1]} of the fleet cannot be read here, and its version may be the one to go "
            "back to",
        )


def rollback_target(history: History) -> tuple[FleetVersion, FleetVersion]:
    """Return the version of the newest COMMIT before the live one, and the live one."""
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
