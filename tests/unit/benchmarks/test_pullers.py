"""The pullers benchmark in small: every client pulled, and its figures are there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.pullers import shares


@pytest.mark.parametrize(
    ("count", "processes", "expected"),
    [(1, 2, [1, 0]), (64, 2, [32, 32]), (7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0])],
)
def test_clients_are_spread_over_the_processes(
    count: int, processes: int, expected: list[int]
) -> None:
    assert shares(count, processes) == expected


def test_one_json_line_with_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.pullers", "--json", "--mib", "2"]
    command += ["--clients", "1", "3", "--rounds", "1"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    for count in (1, 3):
        assert report[f"served_gbps_{count}"] > 0
        assert 0 < report[f"pull_s_{count}"] <= report[f"worst_pull_s_{count}"]
