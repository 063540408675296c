"""The control benchmark in small: every phase has its figures, and pushes ran meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.control import summary
from benchmarks.generating import token_count

_PHASES = ("idle", "one_push", "four_pushes", "stalled")


def _report(*flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.control", "--json", "--mib", "8", *flags]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = done.stdout.splitlines()
    report: dict[str, Any] = json.loads(line)
    return report


def test_one_json_line_with_every_figure() -> None:
    report = _report("--seconds", "0.5")
    for phase in _PHASES:
        figures = [report[f"{phase}_{name}_ms"] for name in ("p50", "p99", "max")]
        assert 0 < figures[0] <= figures[1] <= figures[2]
    assert report["pushed_gbps_one_push"] > 0
    assert report["pushed_gbps_four_pushes"] > 0
    assert report["parameters"]["slots"] == 4
    assert report["parameters"]["engine"] == "none"
    assert not any(name.startswith("tokens_per_s") for name in report)


def test_summary_tells_median_nearly_the_slowest_and_the_slowest() -> None:
    times = [float(ms) for ms in reversed(range(200))]
    assert summary(times) == {"p50": 99.5, "p99": 198.0, "max": 199.0}
    assert summary([1.234]) == {"p50": 1.23, "p99": 1.23, "max": 1.23}


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b"tokens 17\n", 17),
        (b"tokens 0\n", 0),
        (b"INFO tokens 17\n", None),
        (b"tokens per second: 3\n", None),
        (b"\n", None),
    ],
)
def test_lines_of_vllm_are_told_from_counts(line: bytes, count: int | None) -> None:
    assert token_count(line) == count
