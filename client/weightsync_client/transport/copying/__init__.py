"""Copies that digest what they copy: in C where a processor gains by that, else NumPy's.

Neither is imported with this module.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

__all__ = ["STEP", "Copier", "copier_of"]

#: All pieces but the last have a multiple of so many bytes.
STEP = 1024
#: Below this a call of NumPy's and one of xxhash's are as fast.
_LEAST = 384 << 10
#: On processors without one of these levels, two passes are faster, or nobody has measured.
_LEVELS = frozenset({"avx2", "avx512"})


class Copier(Protocol):
    """Copies a text piece by piece, and digests what it copies."""

    def update(self, piece: memoryview, target: memoryview) -> None:
        """Copy the next piece. The GIL is released while a large one is copied.

        Args:
            piece: Contiguous; a multiple of `STEP` bytes, unless it is the last.
            target: As long; nothing of it is kept.
        """

    def digest(self) -> bytes:
        """Return the `weightsync.model.digest.tensor_digest` of all pieces."""


@cache
def _level() -> str:
    from weightsync.delta.kernels import chosen

    return str(getattr(chosen(), "level", ""))


def copier_of(size: int) -> Copier:
    """Return what copies a text of so many bytes fastest."""
    if size >= _LEAST and _level() in _LEVELS:
        from weightsync_client.transport.copying.native import NativeCopier

        return NativeCopier(size, _level())
    from weightsync_client.transport.copying.plain import PlainCopier

    return PlainCopier()
