"""How much memory of the device processes hold, as its driver counts it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

__all__ = ["DeviceMemory", "PeakMemory"]

_EVERY_S = 0.05


class DeviceMemory:
    """The first device that this process may use."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._nvml.nvmlInit()
        # The driver counts all of the host's, whatever is hidden from CUDA.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        self._device = self._nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)

    def of(self, processes: Iterable[int]) -> int:
        """Return the bytes that these processes hold together.

        Raises:
            RuntimeError: The driver does not count by process.
        """
        wanted = set(processes)
        return sum(size for pid, size in self._each().items() if pid in wanted)

    def of_others(self, process: int) -> int:
        """Return the bytes that all processes but one hold.

        Raises:
            RuntimeError: The driver does not count by process.
        """
        return sum(size for pid, size in self._each().items() if pid != process)

    def _each(self) -> dict[int, int]:
        found = {}
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device):
            if process.usedGpuMemory is None:
                msg = "the driver of this host does not tell how much memory a process holds"
                raise RuntimeError(msg)
            found[int(process.pid)] = int(process.usedGpuMemory)
        return found


class PeakMemory:
    """The most that all processes but one held at a time, while the block ran.

    Args:
        process: That one.

    Attributes:
        peak: Bytes.

    Raises:
        RuntimeError: The driver does not count by process.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._memory = DeviceMemory()
        self.peak = self.now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="device memory", daemon=True)

    def now(self) -> int:
        """Return what they hold at this moment."""
        return self._memory.of_others(self._process)

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.peak = max(self.peak, self.now())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
