"""Which of two modules with one interface is used: numpy's loops, or those that numba compiles."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["Choice"]


class Choice:
    """Compiles once, whoever asks; neither numba nor numpy is imported before.

    Args:
        plain: Imports the module that needs no numba.
        compiled: Imports the other one, which compiles its loops or loads them.
    """

    def __init__(self, plain: Callable[[], ModuleType], compiled: Callable[[], ModuleType]) -> None:
        self._plain = plain
        self._compiled = compiled
        self._lock = threading.Lock()
        self._made: ModuleType | None = None

    @property
    def under_way(self) -> bool:
        """Whether somebody is compiling."""
        return self._made is None and self._lock.locked()

    def ready(self) -> ModuleType:
        """Return the compiled module if it is there, else the plain one; at once."""
        return self._made or self._plain()

    def make(self) -> ModuleType:
        """Return the module to use from now on: the plain one only where numba cannot be used."""
        with self._lock:
            if self._made is None:
                self._made = self._compiled() if _compiles() else self._plain()
            return self._made

    def warm_up(self) -> str:
        """Have it ready: some seconds the first time on a machine, later it is only loaded.

        Returns:
            `compiled`, or `plain` where numba is not installed or is switched off.
        """
        return self.make().__name__.rpartition(".")[2]


def _compiles() -> bool:
    try:
        import numba
    except ImportError:
        return False
    return not numba.config.DISABLE_JIT
