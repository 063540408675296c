"""Bounds on how long an apply may take, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ApplyLimits"]


@dataclass(frozen=True)
class ApplyLimits:
    """Settings of applies.

    Attributes:
        prepare_timeout_s: Longest prepare, seconds.
        commit_timeout_s: Longest commit and verify inside the pause, seconds; then the engine is
            fenced.
        pause_lease_s: How long the engine stays paused without being renewed, seconds.
        in_place_pause_s: How long the engine stands still at most while a trainer writes.
        read_ahead: Whether ranks read a version while it still comes in.
    """

    prepare_timeout_s: float
    commit_timeout_s: float
    pause_lease_s: float
    in_place_pause_s: float = 60.0
    read_ahead: bool = True
