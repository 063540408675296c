"""The staging benchmark in small: its figures are there and it checks bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.staging import PerTensor, Segments, Source


def _objects() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("weightsync-bench-")}  # noqa: PTH208


def test_one_json_line_with_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.staging", "--json", "--mib", "8"]
    command += ["--tensors", "30", "--shards", "4", "--rounds", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert done.stderr == ""
    report = json.loads(line)
    for name in ("per_tensor_gbps", "segments_gbps", "segments_over_per_tensor"):
        assert report[name] > 0
        assert report[f"{name}_as_is"] > 0
        assert report["spread"][name]["rounds"] == 2
    assert report["parameters"] == {"mib": 8, "tensors": 30, "shards": 4, "rounds": 2}
    assert _objects() == set()


async def test_both_ways_notice_a_byte_that_is_not_the_source_s() -> None:
    source = Source.make(1 << 20, 10)
    theirs, ours = PerTensor(), Segments(source, 3)
    await ours.pool.start()
    try:
        expected = source.change()
        await ours.round(expected)
        theirs.round(source, expected)
        source.array[-1] += 1
        with pytest.raises(AssertionError):
            await ours.round(expected)
        with pytest.raises(AssertionError):
            theirs.round(source, expected)
    finally:
        theirs.close()
        await ours.pool.stop()
        ours.close()
    assert _objects() == set()
