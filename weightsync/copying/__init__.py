"""Copies that digest what they copy: compiled by numba where it is installed, else numpy's.

Neither is imported with this module.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["STEP", "Copier", "copier_of", "warm_up"]

#: All pieces but the last have a multiple of so many bytes.
STEP = 1024

_lock = threading.Lock()
_chosen: list[ModuleType] = []


class Copier(Protocol):
    """Copies a text piece by piece, and digests what it copies."""

    def update(self, piece: memoryview, target: memoryview) -> None:
        """Copy the next piece. The GIL is released while a large one is copied.

        Args:
            piece: Contiguous; a multiple of `STEP` bytes, unless it is the last.
            target: As long; nothing of it is kept.
        """

    def digest(self) -> bytes:
        """Return the `weightsync.digest.tensor_digest` of all pieces."""


def copier_of(size: int) -> Copier:
    """Return what copies a text of so many bytes; compiled once `warm_up` has returned."""
    from weightsync.copying import plain

    copier: Copier = (_chosen[0] if _chosen else plain).make_copier(size)
    return copier


def warm_up() -> str:
    """Have the compiled copier ready: seconds the first time on a machine, later it is only loaded.

    Returns:
        `compiled`, or `plain` where numba is not installed or is switched off.
    """
    with _lock:
        if not _chosen:
            _chosen.append(_choose())
    return _chosen[0].__name__.rpartition(".")[2]


def _choose() -> ModuleType:
    from weightsync.copying import plain

    try:
        import numba
    except ImportError:
        return plain
    if numba.config.DISABLE_JIT:
        return plain
    from weightsync.copying import compiled

    return compiled
