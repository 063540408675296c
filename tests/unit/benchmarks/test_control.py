"""The control benchmark in small: every phase has its figures, and pushes ran meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys


def test_one_json_line_with_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.control", "--json"]
    command += ["--seconds", "0.5", "--mib", "8"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    for phase in ("idle", "one_push", "four_pushes", "stalled"):
        figures = [report[f"{phase}_{name}_ms"] for name in ("p50", "p99", "max")]
        assert 0 < figures[0] <= figures[1] <= figures[2]
    assert report["pushed_gbps_one_push"] > 0
    assert report["pushed_gbps_four_pushes"] > 0
    assert report["parameters"]["slots"] == 4
