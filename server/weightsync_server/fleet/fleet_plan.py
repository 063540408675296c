"""What a fleet is to do: which version, on which members, in which waves."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weightsync.errors import Reason, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightsync.engine import PauseSpec

__all__ = ["ApplyPhase", "FleetPlan", "FleetVersion", "Kind", "MemberReport", "Verdict", "divide"]


class Kind(enum.StrEnum):
    """How members change over."""

    #: All prepare, all pause, one decision, all commit.
    BARRIER = "barrier"
    #: One wave after the other, each by a decision of its own.
    ROLLING = "rolling"


class Verdict(enum.StrEnum):
    """What was decided."""

    COMMIT = "COMMIT"
    ABORT = "ABORT"


class ApplyPhase(enum.StrEnum):
    """What a member reports on."""

    #: The version lies ready, the old one is served.
    PREPARED = "prepared"
    #: Nothing is served, and will not be before the decision is known.
    READY = "ready"
    #: The version is live.
    DONE = "done"


@dataclass(frozen=True)
class FleetVersion:
    """A version as a fleet names it; two with the same digest are the same, whatever their numbers.

    Attributes:
        number: Its number in the store, which may be another one on another host.
        digest: Digest of its content, hexadecimal.
    """

    number: int = field(compare=False)
    digest: str


@dataclass(frozen=True)
class FleetPlan:
    """One apply.

    Attributes:
        number: Of the apply; each next one has the next number.
        nonce: Names this plan, whoever else wrote one with the same number; of its coordinator too.
        kind: Barrier or rolling.
        target: What is to be live.
        previous: What is live if it is aborted; None: whatever each member has.
        waves: The members, one wave after the other; a barrier has one.
        decisions: How many COMMITs it takes: one a wave, and one more of a rolling apply, by which
            its last wave is judged.
        rejects: Content digest of a version that nobody may apply after the COMMIT; "": none.
        key: Idempotency key of the call that wanted it; "": it had none.
        pause: How members pause; None: as where nobody chooses. Those that go back, or come late,
            always pause so.
        reason: Why it was asked for, for people; "": nobody said.
        clears: The target's content is accepted again after the COMMIT, if it was rejected.
    """

    number: int
    nonce: str
    kind: Kind
    target: FleetVersion
    previous: FleetVersion | None
    waves: tuple[tuple[str, ...], ...]
    decisions: int
    rejects: str = ""
    key: str = ""
    pause: PauseSpec | None = None
    reason: str = ""
    clears: bool = False

    @property
    def members(self) -> frozenset[str]:
        """All of them."""
        return frozenset(name for wave in self.waves for name in wave)

    def wave_of(self, member: str) -> int:
        """Return the number of the decision that lets a member commit; 0: none does."""
        return next((k for k, wave in enumerate(self.waves, 1) if member in wave), 0)


@dataclass(frozen=True)
class MemberReport:
    """What a member says of one phase.

    Attributes:
        ok: It has come to its end.
        reason: If not, why: one sentence.
    """

    ok: bool
    reason: str = ""


def divide(members: Iterable[str], kind: Kind, max_unavailable: int) -> tuple[tuple[str, ...], ...]:
    """Return members in waves, sorted: all at once, or so many at a time.

    Raises:
        WeightSyncError: REQUEST_INVALID; waves without members.
    """
    names = sorted(members)
    size = max(1, len(names)) if kind is Kind.BARRIER else max_unavailable
    if size < 1:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"{size} members of a wave are none; let 1 or more be away"
        )
    return tuple(tuple(names[at : at + size]) for at in range(0, len(names), size))
