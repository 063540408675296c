"""What log probabilities say of a version: every figure of a gate, and which limit it breaks."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.gate_limits import GateLimits, judge, limit_of, remedy

LIMITS = GateLimits(k3=2e-3)


def _probes(*logprobs: list[float], start: int = 1) -> pb.Probes:
    tokens = list(range(start + max(map(len, logprobs))))
    each = (pb.Probe(tokens=tokens, logprobs=given, start=start) for given in logprobs)
    return pb.Probes(probes=each)


def test_k3_and_the_differences_are_those_of_all_tokens() -> None:
    trainer, engine = [-1.0, -2.0, -0.5], [-1.1, -1.8, -0.5]
    report = judge(42, _probes(trainer), [engine], None, GateLimits(1.0))
    differences = [a - b for a, b in zip(trainer, engine, strict=True)]
    assert report.k3 == pytest.approx(fmean(math.exp(-d) - 1 + d for d in differences), rel=1e-6)
    assert report.mean_abs == pytest.approx(0.1, rel=1e-6)
    assert report.max_abs == pytest.approx(0.2, rel=1e-6)
    assert (report.tokens, report.probes, report.version, report.reason) == (3, 1, 42, "")
    assert not report.HasField("step_k3")


def test_the_direction_counts() -> None:
    up = judge(1, _probes([-1.0]), [[-3.0]], None, LIMITS).k3
    down = judge(1, _probes([-3.0]), [[-1.0]], None, LIMITS).k3
    assert up == pytest.approx(math.exp(-2) + 1)
    assert down == pytest.approx(math.exp(2) - 3)


def test_tokens_before_the_start_are_not_compared() -> None:
    probes = _probes([-1.0, -2.0], start=3)
    report = judge(1, probes, [[-9.0, -9.0, -1.0, -2.0]], None, LIMITS)
    assert (report.tokens, report.k3, report.max_abs) == (2, 0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_always_fails(bad: float) -> None:
    probes = _probes([-1.0, -2.0], [-1.0, -2.0])
    report = judge(42, probes, [[-1.0, -2.0], [-1.0, bad]], None, GateLimits(1e9))
    assert (report.nan, report.worst_probe, report.tokens) == (1, 1, 3)
    assert report.reason.startswith("1 of 4 logprobs of version 42 are not numbers")
    assert "overflow" in remedy(report)
    # Also of a token that nothing is compared with.
    report = judge(42, _probes([-2.0], start=2), [[bad, -2.0]], None, GateLimits(1e9))
    assert report.nan == 1
    assert report.reason


def test_a_version_unlike_its_trainer_names_the_worst_probe() -> None:
    probes = _probes([-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0])
    report = judge(42, probes, [[-1.0, -1.0], [-3.0, -1.0], [-1.5, -1.0]], None, LIMITS)
    assert report.worst_probe == 1
    assert report.reason == (
        f"version 42 answers its probes unlike its trainer (k3 {report.k3:.2g} over 6 tokens, "
        "limit 0.002; worst probe 1)"
    )
    assert "transposed tensors" in remedy(report)


def test_probes_without_logprobs_show_the_step_alone() -> None:
    probes = pb.Probes(probes=[pb.Probe(tokens=[1, 2, 3])])
    live, new = [[-1.0, -2.0]], [[-1.5, -2.0]]
    report = judge(42, probes, new, live, GateLimits(2e-3, step_k3=0.05), previous=41)
    assert (report.tokens, report.k3_limit, report.floor_k3) == (0, 0.0, 0.0)
    assert report.step_k3 == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)
    assert report.reason.startswith("version 42 is 0.053 from 41 (step_k3_limit 0.05)")
    assert judge(42, probes, new, live, LIMITS).reason == ""
    assert judge(42, probes, new, None, GateLimits(2e-3, step_k3=0.05)).reason == ""


def test_a_difference_beyond_all_numbers_is_over_every_limit() -> None:
    report = judge(1, _probes([-1e30]), [[-1.0]], None, GateLimits(1e200))
    assert math.isfinite(report.k3)
    assert report.reason


@pytest.mark.parametrize(
    ("asked", "passed", "limit", "floor"),
    [
        (0.0, [], 2e-3, 0.0),
        (0.0, [1e-5, 3e-5], 1e-3, 2e-5),
        (0.0, [2e-4, 3e-4, 4e-4], 2.4e-3, 3e-4),
        (0.0, [2e-4] * 16 + [1.0] * 20, 1.6e-3, 2e-4),
        (0.5, [3e-4], 0.5, 3e-4),
    ],
)
def test_a_limit_follows_what_has_passed(
    asked: float, passed: list[float], limit: float, floor: float
) -> None:
    assert limit_of(asked, passed) == pytest.approx((limit, floor))
