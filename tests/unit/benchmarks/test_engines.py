"""The benchmark of several engines in small: its figures are there, and memory is counted once."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys

from benchmarks.engines import shared_memory


def test_one_json_line_with_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.engines", "--json", "--mib", "8"]
    command += ["--engines", "1,3", "--rounds", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["parameters"] == {"engines": [1, 3], "mib": 8, "rounds": 2}
    for name in ("memory_over_one", "reserved_over_one", "apply_over_one", "small_over_one"):
        assert report[name] > 0
    for count in (1, 3):
        for name in ("pause_s", "small_pause_s", "prepare_s", "shared_mib", "reserved_mib"):
            assert report[f"{name}_{count}"] > 0
            assert report["spread"][f"{name}_{count}"]["rounds"] == 2
        assert report[f"shared_mib_{count}"] >= 8
    assert report["decision_s"] > 0


def test_what_is_open_twice_and_what_is_only_mapped_counts_once() -> None:
    size = 1 << 20
    before = shared_memory([os.getpid()])
    fd = os.memfd_create("counted")
    os.ftruncate(fd, size)
    os.pwrite(fd, bytes(size), 0)
    again = os.dup(fd)
    with mmap.mmap(fd, size) as mapped:
        assert shared_memory([os.getpid()] * 2) - before == size
        os.close(fd)
        os.close(again)
        # Python's map keeps a descriptor of its own, which counts no second time.
        assert shared_memory([os.getpid()]) - before == size
        assert mapped[0] == 0
    assert shared_memory([os.getpid()]) == before
