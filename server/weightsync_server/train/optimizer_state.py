"""Which version the state of the optimizer goes with, and what makes it that of the live one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KEEP", "LOAD", "RESET", "OptimizerState", "StatePlan"]

KEEP, LOAD, RESET = "keep", "load", "reset"


@dataclass(frozen=True)
class StatePlan:
    """What a trainer does with its state before a job.

    Attributes:
        action: KEEP, LOAD or RESET.
        version: The version whose state it has then; 0: it is begun anew.
        folder: LOAD: from where.
    """

    action: str
    version: int
    folder: str = ""


@dataclass
class OptimizerState:
    """Of one process.

    Attributes:
        version: The version whose state it has; 0: it was begun anew.
        live: The version that it was set up on, or may go on from; 0: none, for a job has failed in
            it.
        fresh: Whether no job has been in it.
    """

    version: int = 0
    live: int = 0
    fresh: bool = True

    def plan(self, live: int, folder: Path | None) -> StatePlan:
        """Return what to do before a job.

        Args:
            live: The version that is live.
            folder: Its saved state; None: it has none.
        """
        if self.live == live and not self.fresh:
            return StatePlan(KEEP, self.version)
        if folder is not None:
            return StatePlan(LOAD, live, str(folder))
        # What it has copied when it was set up is of another version by now.
        return StatePlan(KEEP if self.live == live else RESET, 0)

    def begin(self, plan: StatePlan) -> None:
        """A job begins, after what was planned; until it has ended well its state is of no use."""
        self.version, self.live, self.fresh = plan.version, 0, False

    def end(self, live: int, committed: int) -> None:
        """A job has ended well.

        Args:
            live: The version that it ended on.
            committed: The last one that it has committed; 0: none.
        """
        self.live = live
        self.version = committed or self.version
