"""The collector of `otlp_collector` as a process, and the traces that it has got."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from tests.support.processes import stop

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Collector", "Span", "children", "named"]

Span = dict[str, Any]


class Collector:
    """A collector that listens from `start`, or the begin of a block, until its end."""

    def __init__(self, file: Path) -> None:
        self._file, self._port = file, 0
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.support.otlp_collector"]
        self._process = subprocess.Popen(
            [*command, str(self._file), str(self._port)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def stop(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
            stop(self._process)
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of who sends it spans, without waiting for more to send."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    @property
    def spans(self) -> list[Span]:
        return [json.loads(line) for line in self._file.read_text().splitlines()]

    @property
    def traces(self) -> set[str]:
        """The ids of all traces so far."""
        return {span["trace_id"] for span in self.spans}

    def new_trace(self, before: set[str], whole: Callable[[list[Span]], bool]) -> str:
        """Return the id of the one trace that is not in `before`, once it is whole."""
        end = time.monotonic() + 60
        while not (new := self.traces - before):
            assert time.monotonic() < end, "there is no new trace"
            time.sleep(0.05)
        (found,) = new
        self.trace(found, whole)
        assert self.traces - before == new
        return found

    def trace(self, trace_id: str, whole: Callable[[list[Span]], bool]) -> list[Span]:
        """Return the spans of a trace once they are all there."""
        end = time.monotonic() + 60
        while True:
            found = [span for span in self.spans if span["trace_id"] == trace_id]
            if whole(found):
                return sorted(found, key=lambda span: span["began_ns"])
            names = [span["name"] for span in found]
            assert time.monotonic() < end, f"trace {trace_id} is not whole: {names}"
            time.sleep(0.05)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span["name"] == name]


def children(spans: list[Span], of: Span) -> list[str]:
    """Return the names of what lies directly below a span, sorted."""
    return sorted(span["name"] for span in spans if span["parent"] == of["span_id"])
