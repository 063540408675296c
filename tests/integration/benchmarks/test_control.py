"""The control benchmark beside a real vLLM, in small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.matrix, pytest.mark.timeout(300)]


def test_vllm_generates_in_every_phase() -> None:
    command = [sys.executable, "-m", "benchmarks.control", "--json", "--mib", "8"]
    flags = ["--seconds", "2", "--vllm"]
    done = subprocess.run([*command, *flags], check=True, stdout=subprocess.PIPE, text=True)
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["parameters"]["slots"] == 5
    assert "generating" in report["parameters"]["engine"]
    for phase in ("idle", "one_push", "four_pushes", "stalled"):
        figures = [report[f"{phase}_{name}_ms_generating"] for name in ("p50", "p99", "max")]
        assert 0 < figures[0] <= figures[1] <= figures[2]
        assert report[f"tokens_per_s_{phase}_generating"] > 0
