"""The training benchmark in small: a live vLLM holds the last of real steps to the bit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.battery, pytest.mark.timeout(420)]


def test_a_live_vllm_holds_the_last_step_to_the_bit() -> None:
    command = [sys.executable, "-m", "benchmarks.train", "--json", "--steps", "4"]
    command += ["--warm-steps", "5", "--hidden", "128", "--layers", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=400)
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["bitwise_equal"] is True
    for rate in report["parameters"]["rates"]:
        assert report[f"full_pushes_{rate}"] == 1
        assert len(report[f"rows_{rate}"]) == 3
        assert report[f"ratio_to_dense_{rate}"] > 4
        assert all(0 < row["changed_fraction"] < 0.5 for row in report[f"rows_{rate}"])
