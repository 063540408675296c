"""Which contents a fleet rejects: what the newest COMMIT about a content says, by apply numbers.

A rollback rejects the content that it leaves; an apply may have its own accepted again. The numbers
of the applies say which of two came last, no clock and no order of writing: whoever writes a mark
late writes the same key as others before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync_server.fleet.decision import create_until_answered
from weightsync_server.fleet.fleet_keys import (
    REJECTED,
    REJECTED_SINCE,
    REJECTED_UNTIL,
    rejected_key,
    rejected_since_key,
    rejected_until_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from weightsync_server.fleet.fleet_plan import FleetPlan
    from weightsync_server.register.register import Register

__all__ = [
    "ContentMark",
    "keep_marks",
    "marks_of_keys",
    "marks_of_plans",
    "newest_marks",
    "superseded_marks",
]


class ContentMark(NamedTuple):
    """What one COMMIT says of a content.

    Attributes:
        number: Of the apply; 0: of one that is not known any more, before every other.
        digest: Of the content.
        rejected: Nobody applies it from then on; False: it is accepted again.
    """

    number: int
    digest: str
    rejected: bool


def marks_of_keys(keys: Iterable[str]) -> Iterator[ContentMark]:
    """Yield what the keys below `rejected/` say; others are left out."""
    for key in keys:
        for prefix, rejected in ((REJECTED_SINCE, True), (REJECTED_UNTIL, False)):
            if key.startswith(prefix):
                number, _, digest = key[len(prefix) :].partition("/")
                yield ContentMark(int(number), digest, rejected)
                break
        else:
            if key.startswith(REJECTED):
                yield ContentMark(0, key[len(REJECTED) :], rejected=True)


def marks_of_plans(plans: Iterable[FleetPlan]) -> Iterator[ContentMark]:
    """Yield what plans say that are committed."""
    for plan in plans:
        if plan.rejects:
            yield ContentMark(plan.number, plan.rejects, rejected=True)
        if plan.clears:
            yield ContentMark(plan.number, plan.target.digest, rejected=False)


def newest_marks(marks: Iterable[ContentMark]) -> Mapping[str, bool]:
    """Return for each content that was ever rejected or accepted again whether it is rejected."""
    return {digest: rejected for _, digest, rejected in sorted(marks)}


async def keep_marks(register: Register, plans: Iterable[FleetPlan]) -> None:
    """Have what committed plans say in keys of their own, which outlast the plans.

    Raises:
        WeightSyncError: As `create_until_answered`.
    """
    for number, digest, rejected in marks_of_plans(plans):
        # The first of them is all that the first release reads.
        since = (rejected_key(digest), rejected_since_key(number, digest))
        for key in since if rejected else (rejected_until_key(number, digest),):
            await create_until_answered(register, key, b"{}")


async def superseded_marks(register: Register) -> list[str]:
    """Return the keys below `rejected/` that say nothing which the newest of a content does not.

    Raises:
        WeightSyncError: As `Register.list`.
    """
    keys = await register.list(REJECTED)
    marks = {key: mark for key in keys for mark in marks_of_keys([key])}
    newest: dict[str, ContentMark] = {}
    for mark in marks.values():
        newest[mark.digest] = max(mark, newest.get(mark.digest, mark))
    return [
        key
        for key, mark in marks.items()
        # Of what is rejected the first release reads the one without a number alone.
        if mark != newest[mark.digest] and not (newest[mark.digest].rejected and not mark.number)
    ]
