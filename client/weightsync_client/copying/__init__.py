"""Copies that digest what they copy: compiled by numba where it is installed, else numpy's.

Neither is imported with this module.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Protocol

from weightsync.jit.choosing import Choice

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["STEP", "Copier", "copier_of", "warm_up"]

#: All pieces but the last have a multiple of so many bytes.
STEP = 1024


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


def _plain() -> ModuleType:
    from weightsync_client.copying import plain

    return plain


def _compiled() -> ModuleType:
    # On other processors nobody has measured whether it is faster.
    if platform.machine() != "x86_64":
        return _plain()
    from weightsync_client.copying import compiled

    return compiled


_choice = Choice(_plain, _compiled)


def copier_of(size: int) -> Copier:
    """Return what copies a text of so many bytes; compiled once `warm_up` has returned."""
    copier: Copier = _choice.ready().make_copier(size)
    return copier


def warm_up() -> str:
    """Have the compiled copier ready: seconds the first time on a machine, later it is only loaded.

    Returns:
        `compiled`, or `plain` where numba is not installed or the processor is not x86-64.
    """
    return _choice.warm_up()
