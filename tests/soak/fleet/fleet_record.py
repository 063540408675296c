"""What was seen of a fleet, from outside: what was decided, and what was served.

All times are of one monotonic clock, that of the process that looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["FleetRecord", "SeenApply", "SeenDecision", "Served"]

COMMIT, ABORT = "COMMIT", "ABORT"


@dataclass(frozen=True)
class SeenDecision:
    """A decision as the register shows it.

    Attributes:
        verdict: COMMIT or ABORT.
        after: It was made later than this: here began the last reading that did not show it.
        by: It was made by then: here ended the first reading that showed it.
        body: Its record.
    """

    verdict: str
    after: float
    by: float
    body: bytes = b""


@dataclass(frozen=True)
class SeenApply:
    """A plan as the register shows it, and what was decided on it.

    Attributes:
        number: Of the apply.
        kind: barrier or rolling.
        target: Content digest of what is to be live.
        waves: The members.
        needed: How many COMMITs it takes.
        decisions: In order.
        rollback: Whether it rejects what it leaves.
        planned: When its plan had been seen.
    """

    number: int
    kind: str
    target: str
    waves: tuple[tuple[str, ...], ...]
    needed: int
    decisions: tuple[SeenDecision, ...] = ()
    rollback: bool = False
    planned: float = math.inf

    @property
    def outcome(self) -> str:
        """COMMIT or ABORT; empty: it runs."""
        if any(one.verdict == ABORT for one in self.decisions):
            return ABORT
        return COMMIT if len(self.decisions) >= self.needed else ""

    @property
    def members(self) -> frozenset[str]:
        """All of them."""
        return frozenset(name for wave in self.waves for name in wave)

    def wave_of(self, member: str) -> int:
        """Return the number of the decision that lets a member serve the target; 0: the last."""
        return next((k for k, wave in enumerate(self.waves, 1) if member in wave), 0)


@dataclass
class Served:
    """A member's engine answered so many times in a row that it generates with one content.

    Attributes:
        member: Its name.
        content: Content digest.
        begun: When the first answer had come.
        ended: When the last one was asked for.
        since: It began to later than this: here was asked for the last answer that told otherwise.
    """

    member: str
    content: str
    begun: float
    ended: float
    since: float = -math.inf


@dataclass
class FleetRecord:
    """All of it.

    Attributes:
        first: Content digest that engines start with.
        applies: By number.
        served: In the order in which each began.
    """

    first: str
    applies: dict[int, SeenApply] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
