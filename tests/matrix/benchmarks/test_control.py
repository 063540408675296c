"""The control benchmark beside a real vLLM, in small."""

from __future__ import annotations

import pytest

from tests.support.benchmark_lines import benchmark_line

pytestmark = [pytest.mark.vllm, pytest.mark.battery, pytest.mark.timeout(300)]


def test_vllm_generates_in_every_phase() -> None:
    report = benchmark_line("control", "--mib", "8", "--seconds", "2", "--vllm")
    assert report["parameters"]["slots"] == 5
    assert "generating" in report["parameters"]["engine"]
    for phase in ("idle", "one_push", "four_pushes", "stalled"):
        figures = [report[f"{phase}_{name}_ms_generating"] for name in ("p50", "p99", "max")]
        assert 0 < figures[0] <= figures[1] <= figures[2]
        assert report[f"tokens_per_s_{phase}_generating"] > 0
