"""How long members and coordinators of a fleet wait, and how far hosts may be apart."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.errors import Reason, WeightSyncError

__all__ = ["FleetLimits"]


@dataclass(frozen=True)
class FleetLimits:
    """Durations in seconds, each counted by the process that waits, by a clock that only rises.

    Attributes:
        undecided_s: How long a member of a barrier stands still without a decision until it fences
            itself.
        max_skew: By how many rolling commits a host that serves may be behind.
        max_age_s: How old what a host has read in the register may be while it serves; 0: any age,
            so that hosts go on when the register is lost.
        member_ttl_s: After which a member that is not renewed is gone.
        grace_s: How long the coordinator of a running apply is gone until members abort it.
        prepare_s: The longest time of an apply until everybody of a wave is ready.
        settle_s: How long a coordinator waits for members to become live after COMMIT.
        retry_s: Pause before a member prepares or commits again what failed.
        poll_s: How often the register is read where no hint comes.
    """

    undecided_s: float = 30.0
    max_skew: int = 1
    max_age_s: float = 0.0
    member_ttl_s: int = 10
    grace_s: float = 5.0
    prepare_s: float = 600.0
    settle_s: float = 120.0
    retry_s: float = 5.0
    poll_s: float = 10.0

    def __post_init__(self) -> None:
        positive = (self.undecided_s, self.grace_s, self.prepare_s, self.settle_s, self.retry_s)
        if min(*positive, self.poll_s) <= 0 or self.max_skew < 0 or self.max_age_s < 0:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                "a fleet's limits are above 0, max_skew and max_age_s 0 or more; correct them",
            )
        if self.member_ttl_s < 1:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, "a member's time is a whole second or more; give it that"
            )
        if 0 < self.max_age_s < 2 * self.poll_s:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"max_age_s {self.max_age_s:g} is less than two readings of the register, "
                f"{2 * self.poll_s:g} s; raise it or read more often",
            )
