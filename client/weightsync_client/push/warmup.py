"""Has loops compiled while nobody waits for them; what is imported for that, only then."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

__all__ = ["Warmup", "compile_codec"]


class Warmup:
    """Compiles in a thread of its own, once; until then what is compiled is slower.

    Args:
        work: Compiles.
    """

    def __init__(self, work: Callable[..., object]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, *facts: object) -> None:
        """Begin, unless it was begun; returns at once.

        Args:
            facts: For the work.
        """
        with self._lock:
            if self._thread is None:
                # No daemon: a compiler that is torn down with the interpreter may crash it.
                self._thread = threading.Thread(
                    target=self._work, args=facts, name="weightsync-warm-up"
                )
                self._thread.start()


def compile_codec(devices: Iterable[torch.device]) -> None:
    """Have all loaded and compiled that makes deltas.

    Args:
        devices: Those where tensors will be compared.
    """
    from weightsync.delta import warm_up

    warm_up()
    if not devices:
        return
    from weightsync.gpu.device_kernels import Kernels
    from weightsync.gpu.nvrtc import NvrtcError

    for device in frozenset(devices):
        # Who compares says why there are none. Nothing is loaded here: the trainer may be capturing
        # a graph, which no other thread must disturb.
        with contextlib.suppress(NvrtcError):
            Kernels.compile_for(device)
