"""What operators see of deltas; a part of `weightsync_server.ops.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from weightsync_server.deltas import DeltaCounts

__all__ = ["CODINGS", "FALLBACKS", "DeltaMetrics"]

CODINGS = ("unchanged", "gap16", "gap8", "bitmap", "dense")
#: Why a trainer pushed in full, as the proto lists it; the last one is the rest.
FALLBACKS = (
    "first", "no_room", "new_run", "base_mismatch", "layout_changed", "too_dense", "copied",
    "other",
)  # fmt: skip


class DeltaMetrics:
    """Counts of the deltas of one model.

    Args:
        model: The only value of the label `model`.
        registry: Where the metrics live.
    """

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weightsync_delta_{name}", text, ["model", *labels], registry=registry)

        self._bytes = counter("bytes_total", "Bytes of the shards of committed deltas.")
        self._dense = counter("dense_bytes_total", "Bytes of the same versions in full.")
        self._folds = counter("folds_total", "Deltas that are kept in full now.")
        for alone in (self._bytes, self._dense, self._folds):
            alone.labels(model)
        self._tensors = counter(
            "tensors_total", "Tensors of committed deltas, by how they came.", "coding"
        )
        for coding in CODINGS:
            self._tensors.labels(model, coding)
        self._fallbacks = counter(
            "fallbacks_total", "Full pushes in the place of deltas, by reason.", "reason"
        )
        for reason in FALLBACKS:
            self._fallbacks.labels(model, reason)
        self._fraction = Gauge(
            "weightsync_delta_changed_fraction",
            "Share of the elements that the newest delta changed.",
            ["model"],
            registry=registry,
        ).labels(model)

    def count(self, counts: DeltaCounts) -> None:
        """Count a delta that was committed."""
        self._bytes.labels(self._model).inc(counts.delta_bytes)
        self._dense.labels(self._model).inc(counts.dense_bytes)
        self._fraction.set(counts.fraction)
        for coding, tensors in counts.codings.items():
            self._tensors.labels(self._model, coding).inc(tensors)

    def count_fallback(self, reason: str) -> None:
        """Count a full push and why it was no delta."""
        known = reason if reason in FALLBACKS else FALLBACKS[-1]
        self._fallbacks.labels(self._model, known).inc()

    def count_fold(self) -> None:
        """Count a delta that is kept in full now."""
        self._folds.labels(self._model).inc()
