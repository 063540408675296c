"""What a part has measured so far: it can be printed at any moment, also after a failure."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from benchmarks import report
from benchmarks.gpu.wanted import PART_ROWS, ROWS, beside

__all__ = ["Results"]


class Results:
    """Figures, facts and failures of one part.

    Args:
        part: Its name.
        budget_s: How long it may take.
        out: Where the line goes.

    Attributes:
        parameters: What was measured, and on what.
        samples: One value per round of each figure.
        facts: Figures that are no median.
        errors: What failed, one sentence each.
    """

    def __init__(self, part: str, budget_s: float, out: TextIO) -> None:
        self.part = part
        self.parameters: dict[str, Any] = {"part": part}
        self.samples: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}
        self.errors: list[str] = []
        self._begun = time.monotonic()
        self._budget_s = budget_s
        self._printed = threading.Lock()
        self._out = out

    @property
    def left_s(self) -> float:
        """Seconds until the part should be over."""
        return self._begun + self._budget_s - time.monotonic()

    def add(self, **values: float) -> None:
        """Note one round's values."""
        for name, value in values.items():
            self.samples.setdefault(name, []).append(value)

    def say(self, text: str) -> None:
        """Tell progress on standard error."""
        elapsed = time.monotonic() - self._begun
        print(f"[{self.part} {elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Note a failure of the block and go on after it."""
        self.say(what)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other figures are still wanted
            traceback.print_exc(file=sys.stderr)
            self.errors.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")

    def rounds(self, count: int, what: str, reserve_s: float = 30.0) -> Iterator[int]:
        """Yield 0, 1, ... and stop early when another round would not fit.

        Args:
            count: How many.
            what: Is done in a round.
            reserve_s: What comes after the rounds takes so long.
        """
        longest = 0.0
        for number in range(count):
            if longest + reserve_s > self.left_s:
                self.errors.append(f"{what}: time for {number} of {count} rounds only")
                return
            begin = time.monotonic()
            self.say(f"{what}, {number + 1} of {count}")
            yield number
            longest = max(longest, time.monotonic() - begin)

    def emit(self, *, as_json: bool) -> None:
        """Print everything once, each figure beside its limit; a second call does nothing."""
        if not self._printed.acquire(blocking=False):
            return
        samples = {name: list(values) for name, values in self.samples.items() if values}
        figures = {name: report.median(values) for name, values in samples.items()}
        rows = beside({**self.parameters, **self.facts, **figures}, PART_ROWS.get(self.part, ROWS))
        facts = {**self.facts, "beside": rows, "errors": list(self.errors)}
        with contextlib.redirect_stdout(self._out):
            report.emit("gpu", self.parameters, samples, facts, as_json=as_json)
        self._out.flush()
