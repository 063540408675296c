"""What a register that is looked at time and again tells of its changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync import clock

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KeyChanges"]

#: After how long it tells that anything may have changed, whatever it saw, seconds.
_BACKSTOP_S = 30.0


class KeyChanges:
    """Compares each look with the one before."""

    def __init__(self) -> None:
        self._before: Mapping[str, object] = {}
        self._all_at = -_BACKSTOP_S

    def see(self, now: Mapping[str, object]) -> frozenset[str] | None:
        """Return the keys that changed; none of them: any may have; None: nothing did.

        Args:
            now: The keys, each with what changes when its value or its holder does.
        """
        before, self._before = self._before, now
        if clock.monotonic() >= self._all_at + _BACKSTOP_S:
            self._all_at = clock.monotonic()
            return frozenset()
        changed = frozenset(key for key, _ in before.items() ^ now.items())
        return changed or None

    def lost(self) -> None:
        """Take note that a look failed: what changed meanwhile is not known."""
        self._all_at = -_BACKSTOP_S
