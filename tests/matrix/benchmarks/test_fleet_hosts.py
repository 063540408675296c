"""The benchmark of a fleet on hosts with links, in small, as a user starts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.conftest import require_namespaces
from tests.support.benchmark_lines import benchmark_line

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.battery, pytest.mark.timeout(300)]

_WAYS = ("file", "s3", "grpc")


def test_bytes_decisions_and_a_late_joiner(etcd: str, program: Callable[[str, str], str]) -> None:
    require_namespaces()
    assert etcd
    assert program("tc", "iproute2")
    flags = ("--hosts", "2", "--mib", "4", "--rounds", "1", "--decisions", "3")
    report = benchmark_line("fleet", *flags)
    given = {"hosts": 2, "size": 4 << 20, "rounds": 1, "decisions": 3}
    assert given.items() <= report["parameters"].items()
    for way in _WAYS:
        for name in ("push_to_staged_everywhere_s", "push_s", "over_one_by_one", "cores"):
            assert report[f"{name}_{way}"] > 0
    # What a store takes it takes once, whatever of it is headers; each follower asks the origin.
    for way in ("file", "s3"):
        assert 1 <= report[f"origin_sent_{way}"] < 1.5
    assert 2 <= report["origin_sent_grpc"] < 2.5
    # Nothing is faster than the links are.
    least_s = report["parameters"]["size"] / report["parameters"]["link_bytes_per_s"]
    assert report["link_s"] > 0.8 * least_s
    assert report["one_by_one_s"] > 1.8 * least_s
    assert report["push_to_staged_everywhere_s_grpc"] > 1.8 * least_s
    assert report["push_to_staged_everywhere_s_s3"] > 1.8 * least_s
    assert report["spread"]["decision_s"]["rounds"] == 3
    assert report["spread"]["skew_s"]["rounds"] == 3
    for name in (
        "decision_p99_s",
        "create_to_read_p99_s",
        "barrier_s",
        "late_joiner_s",
        "start_s",
        "disk_s",
    ):
        assert report[name] > 0
    assert report["decision_s"] <= report["decision_p99_s"] <= report["spread"]["barrier_s"]["max"]
    assert report["skew_p99_s"] >= report["skew_s"] >= 0
    assert report["late_joiner_s"] > least_s
