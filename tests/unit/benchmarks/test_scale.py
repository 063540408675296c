"""The scale benchmark in small: tensors are what they should be, and its figures are there."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.scale import Kind, figures, split

_WORDS = np.arange(1 << 10, dtype=np.uint64)


@pytest.mark.parametrize(("size", "count"), [(1 << 13, 7), (1 << 12, 100), (1 << 15, 40)])
def test_a_version_has_its_tensors_and_its_bytes(size: int, count: int) -> None:
    tensors = split(_WORDS, Kind("kind", size, count))
    assert len(tensors) == count
    assert sum(tensor.nbytes for tensor in tensors.values()) == size
    # They are the words themselves, so that changing those changes every tensor.
    assert all(np.shares_memory(tensor, _WORDS) for tensor in tensors.values())


def test_figures_are_of_the_medians() -> None:
    sizes = [Kind("small", 1, 1), Kind("large", 2, 1)]
    counts = [Kind("few", 1, 10), Kind("some", 1, 100), Kind("many", 1, 1010)]
    samples = {
        "cost_small": [12.0, 10.0, 99.0],
        "cost_large": [9.0, 1.0, 10.0],
        "push_s_few": [0.1, 0.1, 5.0],
        "push_s_some": [9.0],
        "push_s_many": [0.15, 0.2, 0.05],
        "adopt_s_few": [1.0],
        "adopt_s_many": [1.1],
        "adopt_kib_few": [100.0],
        "adopt_kib_many": [2100.0],
    }
    assert figures(sizes, counts, samples) == {
        "flat": 1.333,
        "microseconds_per_tensor": 50.0,
        "adopt_microseconds_per_tensor": 100.0,
        "kib_per_tensor": 2.0,
    }


# Six servers start, one after the other.
@pytest.mark.timeout(300)
def test_one_json_line_with_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.scale", "--json", "--mib", "1", "--rounds", "1"]
    command += ["--factors", "1", "4", "--tensors", "10", "300"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    for name in ("1_mib", "4_mib", "10_tensors", "300_tensors"):
        assert report[f"push_s_{name}"] > 0
        assert report[f"cost_{name}"] > 0
        if name.endswith("_tensors"):
            assert report[f"adopt_s_{name}"] > 0
    assert report["flat"] >= 1
    assert "microseconds_per_tensor" in report
