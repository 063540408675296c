"""Kernels: compiled by numba where it is installed, else numpy's; both make the same streams.

numba is imported, and its kernels are compiled, by `warm_up` or when they are first needed, not
with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.jit.choosing import Choice

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["chosen", "warm_up"]


def _plain() -> ModuleType:
    from weightsync.delta.kernels import plain

    return plain


def _compiled() -> ModuleType:
    from weightsync.delta.kernels import compiled

    return compiled


_choice = Choice(_plain, _compiled)


def chosen() -> ModuleType:
    """Return the module of kernels to use; the first call compiles them or loads them.

    While another thread does that, for seconds or on a busy host for a minute, numpy's serve.
    """
    return _choice.ready() if _choice.under_way else _choice.make()


def warm_up() -> str:
    """Have all kernels ready, so that no push or apply waits for them.

    The first time on a machine this takes some seconds where numba is installed; later ones load
    the machine code from a folder of the user's.

    Returns:
        `compiled`, or `plain` for numpy's.
    """
    return _choice.warm_up()
