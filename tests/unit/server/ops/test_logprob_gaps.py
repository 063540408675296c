"""Which series the metrics of the gap have, and what they say."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from weightsync_server.ops.logprob_gaps import LogprobGaps, LogprobSums


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def gaps(registry: CollectorRegistry) -> LogprobGaps:
    return LogprobGaps("m", registry)


def _series(registry: CollectorRegistry, name: str) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["version"], sample.labels["lag"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_a_series_is_the_mean_of_all_that_was_reported_of_it(
    gaps: LogprobGaps, registry: CollectorRegistry
) -> None:
    gaps.add(7, 1, LogprobSums(1, 1.0, 0.5))
    gaps.add(7, 1, LogprobSums(3, 1.0, 0.1))
    gaps.add(7, 2, LogprobSums(2, 3.0, 1.0))
    mean = _series(registry, "weightsync_logprob_gap")
    assert mean == pytest.approx({("7", "1"): 0.5, ("7", "2"): 1.5})
    k3 = _series(registry, "weightsync_logprob_gap_k3")
    assert k3 == pytest.approx({("7", "1"): 0.15, ("7", "2"): 0.5})
    assert registry.get_sample_value("weightsync_logprob_tokens_total", {"model": "m"}) == 6


def test_the_newest_versions_alone_have_series(
    gaps: LogprobGaps, registry: CollectorRegistry
) -> None:
    for version in range(1, 21):
        gaps.add(version, 1, LogprobSums(1, 1.0, 1.0))
        gaps.add(version, 2, LogprobSums(1, 1.0, 1.0))
    # One that comes late takes the place of no newer one.
    gaps.add(3, 1, LogprobSums(1, 1.0, 1.0))
    expected = {(str(version), lag) for version in range(5, 21) for lag in ("1", "2")}
    for name in ("weightsync_logprob_gap", "weightsync_logprob_gap_k3"):
        assert _series(registry, name).keys() == expected
    assert registry.get_sample_value("weightsync_logprob_tokens_total", {"model": "m"}) == 41


def test_long_lags_have_one_series(gaps: LogprobGaps, registry: CollectorRegistry) -> None:
    gaps.add(1, 16, LogprobSums(1, 1.0, 1.0))
    gaps.add(1, 5000, LogprobSums(1, 3.0, 1.0))
    assert _series(registry, "weightsync_logprob_gap") == {("1", "16"): 2.0}
