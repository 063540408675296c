"""Time is read in one place, so that every test of it is a test of the code that runs."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).resolve().parents[2]
#: The seam itself, and the faults that are injected by standing still.
_FREE = {"weightsync/clock.py", "weightsync/failpoints.py"}
#: How long something took decides nothing.
_ALLOWED = {"perf_counter"}
_DATES = {"now", "utcnow", "today"}


def _readings(source: str) -> Iterator[str]:
    """Yield what reads a clock, or sleeps, by itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield f"from time import {', '.join(name.name for name in node.names)}"
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner == "time" and node.attr not in _ALLOWED:
                yield f"time.{node.attr}"
            elif node.attr in _DATES and owner.split(".")[-1] in ("datetime", "date"):
                yield f"{owner}.{node.attr}"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time\nclock = time.monotonic",
        "from time import monotonic",
        "import time\ntime.sleep(1)",
        "import datetime as dt\ndt.datetime.now(dt.UTC)",
        "from datetime import date\ndate.today()",
    ],
)
def test_the_check_finds_what_it_looks_for(source: str) -> None:
    assert list(_readings(source))


def test_nobody_reads_a_clock_of_his_own() -> None:
    found = []
    for folder in ("weightsync", "server/weightsync_server"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(_ROOT))
            if name not in _FREE:
                found += [f"{name}: {what}" for what in _readings(path.read_text())]
    assert not found, "call weightsync.clock instead"
