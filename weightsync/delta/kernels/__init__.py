"""Kernels: compiled by numba where it is installed, else numpy's; both make the same streams.

numba is imported, and its kernels are compiled, by `warm_up` or when they are first needed, not
with this module.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["chosen", "warm_up"]

_lock = threading.Lock()
_chosen: list[ModuleType] = []


def _choose() -> ModuleType:
    try:
        import numba
    except ImportError:
        from weightsync.delta.kernels import plain

        return plain
    if numba.config.DISABLE_JIT:
        from weightsync.delta.kernels import plain

        return plain
    from weightsync.delta.kernels import compiled

    return compiled


def chosen() -> ModuleType:
    """Return the module of kernels to use; the first call compiles them or loads them.

    While another thread does that, for seconds or on a busy host for a minute, numpy's serve.
    """
    if not _chosen and _lock.locked():
        from weightsync.delta.kernels import plain

        return plain
    _prepare()
    return _chosen[0]


def _prepare() -> None:
    with _lock:
        if not _chosen:
            _chosen.append(_choose())


def warm_up() -> str:
    """Have all kernels ready, so that no push or apply waits for them.

    The first time on a machine this takes some seconds where numba is installed; later ones load
    the machine code from a folder of the user's.

    Returns:
        `compiled`, or `plain` for numpy's.
    """
    _prepare()
    return _chosen[0].__name__.rpartition(".")[2]
