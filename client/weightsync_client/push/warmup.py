"""Has the kernels that compare tensors on GPUs compiled while nobody waits for them."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    import torch

__all__ = ["Warmup"]


class Warmup:
    """Compiles kernels in a thread of its own, once: half a second of the first delta.

    Tensors of the host need none, and what is imported for them is too little to be worth a thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, devices: AbstractSet[torch.device]) -> None:
        """Begin, unless it was begun or there is no device; returns at once.

        Args:
            devices: Those where tensors will be compared.
        """
        with self._lock:
            if devices and self._thread is None:
                # No daemon: a compiler that is torn down with the interpreter may crash it.
                self._thread = threading.Thread(
                    target=_compile_kernels, args=[devices], name="weightsync-warm-up"
                )
                self._thread.start()


def _compile_kernels(devices: AbstractSet[torch.device]) -> None:
    from weightsync.gpu.device_kernels import Kernels
    from weightsync.gpu.nvrtc import NvrtcError

    for device in devices:
        # Who compares says why there are none. Nothing is loaded here: the trainer may be capturing
        # a graph, which no other thread must disturb.
        with contextlib.suppress(NvrtcError):
            Kernels.compile_for(device)
