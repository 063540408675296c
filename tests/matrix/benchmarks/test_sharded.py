"""The benchmark of a sharded trainer's pushes, in small, as a user starts it."""

from __future__ import annotations

import pytest

from tests.support.benchmark_lines import benchmark_line

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "form",
    [
        # Whose tensors are cut along both axes, by two meshes.
        "fsdp_tp",
        pytest.param("fsdp2", marks=pytest.mark.battery),
        pytest.param("hsdp", marks=pytest.mark.battery),
    ],
)
def test_ranks_push_what_a_gather_would(form: str) -> None:
    report = benchmark_line(
        "sharded", "--mib", "4", "--blocks", "4", "--rounds", "1", "--forms", form
    )
    assert report["parameters"]["tensors"] == 12
    assert report["parameters"]["bytes"] >= 4 << 20
    prefix = "" if form == "fsdp2" else f"{form}_"
    assert report[f"{prefix}bitwise_equal"] is True
    assert 0 < report[f"{prefix}delta_bytes"] < report["parameters"]["bytes"] / 10
    assert report[f"{prefix}delta_over_unsharded"] < 2
    for name in ("push_s", "gather_push_s", "over_gather", "push_over_memcpy", "delta_push_s"):
        assert report[prefix + name] > 0
    assert report[f"{prefix}rank0_extra_bytes"] >= 0
    assert report[f"{prefix}rank0_extra_bytes_gather"] > 0
