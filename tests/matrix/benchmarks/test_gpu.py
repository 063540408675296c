"""The benchmark for hosts with GPUs, in small, beside a real vLLM for the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.benchmark_lines import benchmark_line

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]


def _line(part: str) -> dict[str, Any]:
    small = ("--small", "--device", "cpu", "--rounds", "1", "--requests", "2")
    return benchmark_line("gpu", "--part", part, *small)


@pytest.mark.battery
def test_peers_leave_the_trainers_weights() -> None:
    report = _line("peers")
    assert report["errors"] == []
    for name in ("vllm_reload", "torchforge_way"):
        assert report[f"bitwise_equal_{name}"] is True
        assert 0 < report[f"{name}_s"] < report[f"pause_{name}_s"]
        assert report[f"pause_{name}_s"] < report[f"update_end_to_end_{name}_s"]


@pytest.mark.parametrize(
    ("part", "suffixes"),
    [
        pytest.param("apply", ("_s", "_delta_1pct_s"), marks=pytest.mark.battery),
        pytest.param("durable", ("_s", "_delta_1pct_s"), marks=pytest.mark.battery),
        pytest.param("exact", ("_s_exact",), marks=pytest.mark.battery),
    ],
)
def test_applies_leave_the_trainers_weights(part: str, suffixes: tuple[str, ...]) -> None:
    report = _line(part)
    assert report["errors"] == []
    assert report["bitwise_equal"] is True
    for suffix in suffixes:
        paused, whole = report[f"pause_total{suffix}"], report[f"update_end_to_end{suffix}"]
        assert 0 < report[f"commit{suffix}"] + report[f"verify{suffix}"] < paused < whole
        assert f"pause_total{suffix}" in report["beside"]
    assert report["parameters"]["store"].startswith("file" if part == "durable" else "memory")
    if part == "apply":
        assert report["commit_registered_s"] > 0
        assert report["staging_slowdown"] > 0
        assert report["staging_max_gap_s"] > 0


@pytest.mark.battery
def test_a_trainer_in_the_engine_s_memory_leaves_what_the_other_one_has() -> None:
    report = _line("colocated")
    assert report["errors"] == []
    assert report["bitwise_equal"] is True
    for way in ("pushed", "device", "in_place"):
        assert report[f"{way}_rollback_verified"] is True
    assert 0 < report["device_pause_s"] < report["device_served_s"]
    assert report["update_end_to_end_device_s"] > 0
    assert report["host_copy_follows_s"] > 0
    assert 0 < report["read_s"] < report["attach_first_s"]
    assert 0 < report["in_place_commit_s"] < report["in_place_call_s"] < report["in_place_pause_s"]
    assert report["beside"]["in_place_commit_s"]["limit"] == pytest.approx(
        report["read_s"], rel=0.001
    )
    assert report["beside"]["host_copy_follows_s"]["limit"] > 0
