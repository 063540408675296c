"""The benchmark of refused calls, in small: each of them once left 10 KB."""

from __future__ import annotations

import pytest

from tests.support.benchmark_lines import benchmark_line

pytestmark = pytest.mark.timeout(120)


def test_refused_calls_leave_little() -> None:
    report = benchmark_line("refusals", "--calls=3000", "--idle=0")
    assert report["parameters"]["calls"] == 3000
    assert report["start_mib"] > 10
    assert report["growth_mib"] < 15
