"""Bounds on one input: processor time and memory."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MAX_BYTES", "Figures", "Limits"]

#: Inputs up to this many bytes are bound to the limits.
MAX_BYTES = 64 << 10
_MAX_S = 0.1
_MAX_MEMORY = 64 << 20
#: The figures are written down after so many inputs.
_EVERY = 5000


@dataclass
class Figures:
    """What a run has seen.

    Attributes:
        inputs: Inputs tried.
        accepted: Of these, how many the parser took.
        slowest_ms: Most processor time that one took, in milliseconds.
        memory_mib: How far the process's greatest memory has risen since the start.
    """

    inputs: int = 0
    accepted: int = 0
    slowest_ms: float = 0.0
    memory_mib: float = 0.0


class Limits:
    """Tries inputs and keeps the figures in a file, because the fuzzer ends without a goodbye.

    The greatest memory of the process is what counts: where it has risen by less than the limit
    since the start, no single input can have taken more.

    Args:
        attempt: The oracle; returns whether the input was accepted.
        path: Where the figures go.
    """

    def __init__(self, attempt: Callable[[bytes], bool], path: Path) -> None:
        self.figures = Figures()
        self._attempt = attempt
        self._path = path
        self._before = self._memory = _greatest_memory()

    def __call__(self, data: bytes) -> None:
        """Try one input.

        Raises:
            AssertionError: The oracle or a limit is broken.
        """
        seconds = self._timed(data)
        if seconds > _MAX_S:
            # Once may be the machine's fault, or the collector's.
            seconds = min(seconds, self._timed(data), self._timed(data))
        assert seconds <= _MAX_S, f"{len(data)} bytes took {seconds * 1e3:.0f} ms"
        memory = _greatest_memory()
        rise = memory - self._memory
        self._memory = memory
        assert rise <= _MAX_MEMORY, f"{len(data)} bytes took {rise >> 20} MiB"
        figures = self.figures
        figures.slowest_ms = max(figures.slowest_ms, round(seconds * 1e3, 2))
        figures.memory_mib = round((memory - self._before) / (1 << 20), 1)
        if figures.inputs % _EVERY == 1:
            self._path.write_text(json.dumps(asdict(figures)))

    def _timed(self, data: bytes) -> float:
        begin = time.thread_time()
        accepted = self._attempt(data)
        seconds = time.thread_time() - begin
        self.figures.inputs += 1
        self.figures.accepted += accepted
        return seconds


def _greatest_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
