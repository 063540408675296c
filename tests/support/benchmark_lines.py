"""A benchmark, started as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["benchmark_line"]

#: Of what a benchmark that failed has said, characters.
_LAST_WORDS = 4000


def benchmark_line(name: str, *flags: str) -> dict[str, Any]:
    """Return the one JSON line of a benchmark; what went wrong, if it fails, is in the failure.

    Args:
        name: Of its module, below `benchmarks`.
        flags: After `--json`.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *flags]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-_LAST_WORDS:]
    (line,) = done.stdout.splitlines()
    report: dict[str, Any] = json.loads(line)
    return report
