"""The delta benchmark in small: a row per density with its figures, and sizes near the floor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(300)
@pytest.mark.battery
def test_one_json_line_with_a_row_per_density() -> None:
    command = [sys.executable, "-m", "benchmarks.delta", "--json", "--rounds", "1"]
    command += ["--layers", "1", "--vocabulary", "2000", "--density", "0.01", "--density", "0.3"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert done.stderr == ""
    report = json.loads(line)
    assert [row["density"] for row in report["rows"]] == [0.01, 0.3]
    for row in report["rows"]:
        assert abs(row["density_found"] / row["density"] - 1) <= 0.02
        assert row["entropy_floor_given_base"] < row["entropy_floor"] < row["bytes_per_change"]
        assert row["bytes_per_change"] < 1.05 * row["entropy_floor"]
        assert row["bytes_per_change"] < row["bytes_per_change_raw"] < row["xor_bytes_per_change"]
        assert row["pairs_bytes_per_change"] == 6
        assert all(row[f"{name}_over_memcpy"] > 0 for name in ("encode", "decode"))
        low, high = row["spread"]["encode_over_memcpy"]
        assert low <= row["encode_over_memcpy"] <= high
