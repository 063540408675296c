"""What engines of one host prepare together: all of them a version, or none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync_server.engine.outcome import CutoverPlan
from weightsync_server.engine.refusals import of_engine
from weightsync_server.engine.rollout import MemberPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightsync.engine import PauseSpec
    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.engine.engine_group import GroupMember
    from weightsync_server.engine.outcome import Cause, PreparedVersion

__all__ = ["drop_all", "plans_for", "prepare_all"]


async def prepare_all(
    members: Sequence[GroupMember],
    record: VersionRecord,
    timeout_s: float | None,
    spec: PauseSpec,
    *,
    durable: bool,
) -> list[PreparedVersion]:
    """Prepare a version on all engines; when one cannot, none keeps what it has prepared.

    Args:
        members: The engines.
        record: The version.
        timeout_s: Longest time, seconds; None: as configured.
        spec: How it will be made live.
        durable: Whether it must be committed.

    Raises:
        WeightSyncError: Of the first one that cannot, naming it where there are several.
    """
    preparing = [
        one.applier.ready(one.session, one.live, record, timeout_s, durable=durable, spec=spec)
        for one in members
    ]
    if len(preparing) == 1:
        return [await preparing[0]]
    tasks = [asyncio.create_task(one) for one in preparing]
    try:
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.wait(tasks)
        for one, task in zip(members, tasks, strict=True):
            if not task.cancelled() and task.exception() is None:
                await one.applier.drop(one.session, one.live, task.result())
        raise
    ready: list[tuple[GroupMember, PreparedVersion]] = []
    failure: BaseException | None = None
    for one, outcome in zip(members, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            ready.append((one, outcome))
            continue
        one.error = outcome
        if isinstance(outcome, WeightSyncError):
            failure = failure or of_engine(one.name, outcome)
        failure = failure or outcome
    if failure is not None:
        await drop_all([one for one, _ in ready], [target for _, target in ready])
        raise failure
    return [target for _, target in ready]


async def drop_all(members: Sequence[GroupMember], targets: Sequence[PreparedVersion]) -> None:
    """Let go of what engines have prepared."""
    for one, target in zip(members, targets, strict=True):
        await one.applier.drop(one.session, one.live, target)


def plans_for(
    members: Sequence[GroupMember],
    targets: Sequence[PreparedVersion],
    spec: PauseSpec,
    cause: Cause,
) -> list[MemberPlan]:
    """Return what each engine shall do, in the order of the engines."""
    return [
        MemberPlan(one, CutoverPlan(target, one.live, spec, cause))
        for one, target in zip(members, targets, strict=True)
    ]
