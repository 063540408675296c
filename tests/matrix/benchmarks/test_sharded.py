"""The benchmark of a sharded trainer's pushes, in small, as a user starts it."""

from __future__ import annotations

import pytest

from tests.support.benchmark_lines import benchmark_line

pytestmark = pytest.mark.timeout(300)


def test_ranks_push_what_a_gather_would() -> None:
    report = benchmark_line("sharded", "--mib", "16", "--rounds", "1")
    assert report["parameters"]["tensors"] == 300
    assert report["parameters"]["bytes"] >= 16 << 20
    for prefix in ("", "hsdp_", "fsdp_tp_"):
        assert report[f"{prefix}bitwise_equal"] is True
        assert 0 < report[f"{prefix}delta_bytes"] < report["parameters"]["bytes"] / 10
        assert report[f"{prefix}delta_over_unsharded"] < 2
        for name in ("push_s", "gather_push_s", "over_gather", "push_over_memcpy", "delta_push_s"):
            assert report[prefix + name] > 0
        assert report[f"{prefix}rank0_extra_bytes"] >= 0
        assert report[f"{prefix}rank0_extra_bytes_gather"] > 0
