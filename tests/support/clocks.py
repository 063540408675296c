"""Clocks that a test sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightsync import clock

if TYPE_CHECKING:
    import pytest

__all__ = ["HOUR", "Clocks"]

HOUR = 3600.0


@dataclass
class Clocks:
    """In the place of all clocks; they stand still unless they are moved.

    Attributes:
        monotonic: Seconds.
        suspended: Seconds for which the host was, which `boottime` counts alone.
        wall: Unix time, seconds.
    """

    monotonic: float = 1000.0
    wall: float = 1.7e9
    suspended: float = 0.0

    @classmethod
    def over(cls, monkeypatch: pytest.MonkeyPatch) -> Clocks:
        """Return clocks that the code of this process reads from now on."""
        clocks = cls()
        monkeypatch.setattr(clock, "monotonic", lambda: clocks.monotonic)
        monkeypatch.setattr(clock, "boottime", lambda: clocks.monotonic + clocks.suspended)
        monkeypatch.setattr(clock, "wall", lambda: clocks.wall)
        monkeypatch.setattr(clock, "wall_ns", lambda: int(clocks.wall * 1e9))
        return clocks

    def let_pass(self, seconds: float) -> None:
        """Move all, as time does."""
        self.monotonic += seconds
        self.wall += seconds
