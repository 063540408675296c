"""The benchmark of refused calls, in small: each of them once left 10 KB."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)


def test_refused_calls_leave_little() -> None:
    command = [sys.executable, "-m", "benchmarks.refusals", "--json", "--calls=3000", "--idle=0"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    assert report["parameters"]["calls"] == 3000
    assert report["start_mib"] > 10
    assert report["growth_mib"] < 15
