"""How one prepared version becomes live on several engines: together, or one after the other."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.engine import idempotency
from weightsync_server.engine.journal_file import Answer
from weightsync_server.engine.outcome import Cause, CutoverPlan
from weightsync_server.engine.together import Together
from weightsync_server.ops.os_errors import translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_server.engine.engine_group import GroupMember
    from weightsync_server.engine.journal import HostJournal

__all__ = ["Consent", "MemberPlan", "roll_out", "switch_together"]

logger = logging.getLogger(__name__)

#: Of what is worst for an engine, first.
_WORST = (Reason.ENGINE_FENCED, Reason.ENGINE_AWAY, Reason.ENGINE_OWNED)


#: How long until a decision that the disk refused is written again, seconds.
_WRITE_AGAIN_S = 0.5


class Consent(Protocol):
    """Of others than the engines of this host.

    Attributes:
        patience_s: The longest time that it may take, seconds.
    """

    patience_s: float

    async def given(self) -> None:
        """Return when the engines, which all stand still and are proved, may go on.

        Raises:
            WeightSyncError: They may not: all go back.
        """


@dataclass(frozen=True)
class MemberPlan:
    """One engine and what it shall do."""

    member: GroupMember
    plan: CutoverPlan

    async def drop(self) -> None:
        """Let go of what was prepared."""
        await self.member.applier.drop(self.member.session, self.plan.base, self.plan.target)

    async def make_live(self, step: Together | None = None) -> pb.ApplyReport:
        """Return when the engine generates on its target; what fails is told to the others."""
        member, name = self.member, self.member.name
        part = step.member(name) if step is not None else None
        try:
            return await member.applier.make_live(member.session, self.plan, part)
        except BaseException as error:
            member.error = error
            if part is not None:
                part.leave(str(error) or "it was interrupted")
            raise


async def switch_together(
    plans: Sequence[MemberPlan], journal: HostJournal, consent: Consent | None = None
) -> dict[str, pb.ApplyReport]:
    """Return when all engines generate on the target, which none did before all were proved.

    Args:
        plans: Engines with the same target, at least one: others that are away join it.
        journal: Where the one INTENT and the one decision go; DONE must follow.
        consent: Of others than these engines, who decide for them; None: nobody else is asked.

    Raises:
        WeightSyncError: APPLY_RESTORED: every engine generates on what it served. Any other: of
            an engine that does not; what was decided is in the journal, and it is brought there.
    """
    named = {one.member.name: one.plan for one in plans}
    try:
        with translate_os_errors("the apply"):
            await failpoints.reach("host.intent")
            await journal.intent(named)
    except BaseException:
        await drop(plans)
        raise

    async def write() -> None:
        with translate_os_errors("the apply"):
            await failpoints.reach("host.decide")
            await journal.commit(named)
            await failpoints.reach("host.decided")

    async def decide() -> None:
        if consent is None:
            await write()
        else:
            await consent.given()
            await _until_written(write)

    step = Together(named, decide, consent.patience_s if consent is not None else 0.0)
    outcomes = await asyncio.gather(*(one.make_live(step) for one in plans), return_exceptions=True)
    errors = _errors(named, outcomes)
    if errors:
        failure = _failure(errors)
        if all(error.reason is Reason.APPLY_RESTORED for error in errors.values()):
            await journal.restored(named, idempotency.pack_refusal(failure.message))
        raise failure
    return dict(zip(named, _reports(outcomes), strict=True))


async def _until_written(write: Callable[[], Awaitable[None]]) -> None:
    """Write down what others have decided: nothing goes on, or back, before the disk has it."""
    while True:
        try:
            return await write()
        except WeightSyncError as error:
            logger.critical("the engines stand still until a decision is written: %s", error)
        await asyncio.sleep(_WRITE_AGAIN_S)


async def drop(plans: Sequence[MemberPlan]) -> None:
    """Let go of what was prepared for applies that are not begun."""
    for one in plans:
        await one.drop()


async def roll_out(
    plans: Sequence[MemberPlan], max_unavailable: int, journal: HostJournal
) -> dict[str, pb.ApplyReport]:
    """Return when all engines generate on the target, a few of them away at once.

    Args:
        plans: Engines with the same target, in the order in which they take it.
        max_unavailable: How many may be away at once.
        journal: Where it goes that all have gone back.

    Raises:
        WeightSyncError: Of the first engines that failed; those that went before are back on what
            they served, or the sentence says which is not.
    """
    reports: dict[str, pb.ApplyReport] = {}
    for start in range(0, len(plans), max_unavailable):
        wave = plans[start : start + max_unavailable]
        outcomes = await asyncio.gather(*map(_live_alone, wave), return_exceptions=True)
        named = [one.member.name for one in wave]
        failed = [one for one in wave if one.member.error is not None]
        if failed:
            await drop(plans[start + max_unavailable :])
            went = [*plans[:start], *(one for one in wave if one not in failed)]
            raise await _put_back(went, failed, _first_failure(named, outcomes), journal)
        reports |= zip(named, _reports(outcomes), strict=True)
    return reports


async def _live_alone(one: MemberPlan) -> pb.ApplyReport:
    report = await one.make_live()
    await one.member.applier.supervisor.journal.done(one.plan, Answer())
    return report


async def _put_back(
    went: Sequence[MemberPlan],
    failed: Sequence[MemberPlan],
    failure: WeightSyncError,
    journal: HostJournal,
) -> WeightSyncError:
    """Return the failure when the engines that went before serve again what they did.

    What those hold that failed may not be known: it is written down what they shall.
    """
    back, left = {one.member.name: one.plan for one in failed}, ""
    for one in reversed(went):
        try:
            await _live_again(one)
        except Exception as error:
            why = error.message if isinstance(error, WeightSyncError) else "a fault in the server"
            logger.critical("engine %s is not put back", one.member.name, exc_info=True)
            left += (
                f"; engine {one.member.name} stays on version {one.plan.target.record.version}, "
                f"for it could not be put back ({why})"
            )
        else:
            back[one.member.name] = one.plan
    await journal.restored(back, Answer())
    return WeightSyncError(
        failure.reason,
        failure.message + left,
        metadata=failure.metadata,
        retry_after_s=failure.retry_after_s,
    )


async def _live_again(one: MemberPlan) -> None:
    member, plan = one.member, one.plan
    # Not the name of what is live: the ranks tell the two apart by it.
    target = await member.applier.ready(
        member.session,
        plan.target,
        plan.base.record,
        None,
        durable=False,
        apply_id=secrets.token_hex(8),
    )
    await _live_alone(MemberPlan(member, CutoverPlan(target, plan.target, plan.spec, Cause())))


def _first_failure(
    names: Sequence[str], outcomes: Sequence[pb.ApplyReport | BaseException]
) -> WeightSyncError:
    """Return one error for all; what nobody foresaw is one of the server."""
    try:
        return _failure(_errors(names, outcomes))
    except Exception:
        logger.exception("engines that went before are put back")
        return WeightSyncError(Reason.FAULT, "a fault in the server; its log tells why")


def _errors(
    names: Sequence[str] | dict[str, CutoverPlan],
    outcomes: Sequence[pb.ApplyReport | BaseException],
) -> dict[str, WeightSyncError]:
    """Return what engines have failed with, by name; what nobody foresaw is raised."""
    errors = {}
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, WeightSyncError):
            errors[name] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return errors


def _reports(outcomes: Sequence[pb.ApplyReport | BaseException]) -> list[pb.ApplyReport]:
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _failure(errors: dict[str, WeightSyncError]) -> WeightSyncError:
    """Return one error for all: that of the engine that is worst off, with what others say."""
    reasons = [error.reason for error in errors.values()]
    reason = next((worst for worst in _WORST if worst in reasons), reasons[0])
    first = next(error for error in errors.values() if error.reason is reason)
    return WeightSyncError(
        reason,
        "; ".join(f"engine {name}: {error.message}" for name, error in errors.items()),
        retry_after_s=first.retry_after_s,
        metadata=dict(first.metadata),
    )
