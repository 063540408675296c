"""How far trainers' log probabilities are from those of answers: metrics of the newest versions."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

#: Versions that have series, and the lag that stands for all longer ones.
_MOST_VERSIONS, _MOST_LAG = 16, 16


class LogprobSums(NamedTuple):
    """What was reported of tokens: their number, and sums over them."""

    tokens: int
    sum_abs: float
    sum_k3: float


class LogprobGaps:
    """Adds up what is reported, by version and lag. Called on the event loop; never blocks.

    The 16 newest versions that something was reported of have series; what comes of an older one
    is counted in tokens alone.
    """

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model
        labels = ["model", "version", "lag"]
        self._mean = Gauge(
            "weightsync_logprob_gap",
            "Mean absolute difference of trainers' log probabilities of a version's tokens from "
            "those that came with them, by how many numbers their own version is above it (16: 16 "
            "or more); of the 16 newest versions.",
            labels,
            registry=registry,
        )
        self._k3 = Gauge(
            "weightsync_logprob_gap_k3",
            "Mean of exp(-d) - 1 + d of the same tokens, where d is the log probability that came "
            "with one less the trainer's.",
            labels,
            registry=registry,
        )
        self._tokens = Counter(
            "weightsync_logprob_tokens_total",
            "Tokens whose log probabilities were compared so.",
            ["model"],
            registry=registry,
        ).labels(model)
        self._sums: dict[int, dict[int, LogprobSums]] = {}

    def add(self, version: int, lag: int, sums: LogprobSums) -> None:
        """Add what was reported of a version's tokens."""
        self._tokens.inc(sums.tokens)
        by_lag = self._sums.setdefault(version, {})
        lag = min(lag, _MOST_LAG)
        tokens, sum_abs, sum_k3 = by_lag.get(lag, (0, 0.0, 0.0))
        total = LogprobSums(tokens + sums.tokens, sum_abs + sums.sum_abs, sum_k3 + sums.sum_k3)
        by_lag[lag] = total
        labels = self._model, str(version), str(lag)
        self._mean.labels(*labels).set(total.sum_abs / total.tokens)
        self._k3.labels(*labels).set(total.sum_k3 / total.tokens)
        if len(self._sums) > _MOST_VERSIONS:
            self._remove(min(self._sums))

    def _remove(self, version: int) -> None:
        for lag in self._sums.pop(version):
            for family in (self._mean, self._k3):
                family.remove(self._model, str(version), str(lag))
