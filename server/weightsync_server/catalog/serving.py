"""Which versions were live, newest last: where Rollback may go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["ServingHistory"]

_KEPT = 64


class ServingHistory:
    """Versions in the order in which they became live."""

    def __init__(self) -> None:
        self._versions: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(self._versions)

    def restore(self, versions: Sequence[int]) -> None:
        """Begin with these, oldest first."""
        self._versions = list(versions)

    def add(self, version: int) -> None:
        """Take note that a version became live."""
        if version in self._versions:
            # Gone back: what came after it is no way back any more.
            del self._versions[self._versions.index(version) :]
        self._versions = [*self._versions, version][-_KEPT:]

    def before(self, live: int, good: Callable[[int], bool]) -> int:
        """Return the last version other than `live` that is still good; 0: none."""
        return next((v for v in reversed(self._versions) if v != live and good(v)), 0)
