"""What operators see: every metric of the server, in one registry.

Names follow https://prometheus.io/docs/practices/naming/: base units, closed sets of labels, no
push or apply ids. Every child exists from the start, so a rate exists before the first failure.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import google.protobuf
import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from weightsync import __version__, clock
from weightsync.engine import EngineHealth, EngineInfo
from weightsync.log_lines import event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.ops.tasks import DeadlineMonitor

logger = logging.getLogger(__name__)


class DeltaCounts(NamedTuple):
    """What is counted of a committed delta.

    `dense_bytes` are those of the whole version. `fraction` is the share of the elements that the
    delta told. `codings` counts tensors by coding, `unchanged` included.
    """

    delta_bytes: int
    dense_bytes: int
    fraction: float
    codings: Mapping[str, int]


class Meters(Protocol):
    """Counts pushes, bytes and durations. Called on the event loop; never blocks."""

    def observe_phase(self, phase: str, seconds: float) -> None:
        """Add one duration of `receive`, `digest`, `persist` or `patch`."""

    def count_push(self, outcome: str) -> None:
        """Count the end of a push: `committed`, `already`, `failed` or `aborted`."""

    def count_cast(self, tensors: int) -> None:
        """Count tensors that a trainer cast to what the engine holds."""

    def add_received(self, size: int) -> None:
        """Count received bytes."""

    def count_delta(self, counts: DeltaCounts) -> None:
        """Count a delta that was committed."""

    def count_fallback(self, reason: str) -> None:
        """Count a full push of a trainer that would have sent a delta, and why it did not."""


_GAUGES = {
    "weightsync_rank_version_skew": "Highest minus lowest version over the ranks.",
    "weightsync_fenced": "1 from a fence until the engine serves again.",
    "weightsync_serving": "1 while the engine serves one verified version.",
    "weightsync_engine_up": "1 while the engine answers.",
    "weightsync_live_check_timestamp_seconds": "When all live parameters were last compared and "
    "held the version, Unix time.",
    "weightsync_loader_up": "1 while every rank's loader can load.",
    "weightsync_arena_bytes": "Memory that holds what was loaded beside generation, over all "
    "ranks; 0: nothing is.",
}
_GATE_GAUGES = {
    "weightsync_gate_k3": "k3 from the trainer to the engine, of the last gate.",
    "weightsync_gate_mean_abs": "Mean absolute difference of log probabilities between trainer and "
    "engine, of the last gate.",
    "weightsync_gate_max_abs": "Largest one, of the last gate.",
    "weightsync_gate_step_k3": "k3 from the version before on the same probes, of the last gate; "
    "0: not known.",
    "weightsync_gate_floor_k3": "Median k3 of the versions that passed before, of the last gate; "
    "0: there was none.",
}
_REQUESTS = {
    "weightsync_cache_cut_requests_total": "Requests that an apply found with cached keys, and "
    "that no other request shares keys with since.",
    "weightsync_cache_moved_requests_total": "Requests that waited over an apply and read keys of "
    "the version after it.",
}


class EngineGauges:
    def __init__(self, model: str, registry: CollectorRegistry, gates: GateMetrics) -> None:
        self.model, self.gates = model, gates
        self.served = Gauge(
            "weightsync_served_version",
            "Version that a rank serves; 0: none.",
            ["model", "engine", "rank"],
            registry=registry,
        )
        self.gauges = {
            name: Gauge(name, text, ["model", "engine"], registry=registry)
            for name, text in (_GAUGES | _GATE_GAUGES).items()
        }
        self.requests = {
            name: Counter(name, text, ["model", "engine"], registry=registry)
            for name, text in _REQUESTS.items()
        }
        self.info = Gauge(
            "weightsync_engine_info",
            "1 for each engine core of a vLLM; labels as vLLM's own metrics have them.",
            ["model", "engine", "model_name", "vllm_engine", "vllm_version"],
            registry=registry,
        )


class EngineMetrics:
    def __init__(self, families: EngineGauges, engine: str) -> None:
        self._families = families
        self._engine = engine
        self._ranks: set[str] = set()
        self._cores: set[tuple[str, ...]] = set()
        # Each exists from the start.
        self._gauges = {
            name: gauge.labels(families.model, engine) for name, gauge in families.gauges.items()
        }
        self._requests = [
            counter.labels(families.model, engine) for counter in families.requests.values()
        ]
        #: The start of the engine that was counted last, and its counts.
        self._counted = ("", [0, 0])

    def count_requests(self, health: EngineHealth) -> None:
        """Add what the engine has counted since this was called last."""
        counts = [health.cut_requests, health.moved_requests]
        start, before = self._counted
        if start != health.engine_id:
            before = [0, 0]
        for counter, now, old in zip(self._requests, counts, before, strict=True):
            counter.inc(max(0, now - old))
        self._counted = (health.engine_id, counts)

    def set_info(self, info: EngineInfo) -> None:
        """Name the engine as vLLM's own metrics do, from a hello until the next or the end."""
        # The first number of a rank's name is the engine core's, vLLM's label `engine`.
        cores = {rank.partition("/")[0] for rank in info.ranks}
        self._set_cores({(info.served_model_name, core, info.vllm_version) for core in cores})

    def _set_cores(self, cores: set[tuple[str, ...]]) -> None:
        family, own = self._families.info, (self._families.model, self._engine)
        for core in self._cores - cores:
            family.remove(*own, *core)
        self._cores = cores
        for core in cores:
            family.labels(*own, *core).set(1)

    def set_served(self, versions: Mapping[str, int]) -> None:
        """Set the version that each rank serves; ranks that are gone disappear."""
        for rank in self._ranks - versions.keys():
            self._families.served.remove(self._families.model, self._engine, rank)
        self._ranks = set(versions)
        for rank, version in versions.items():
            self._families.served.labels(self._families.model, self._engine, rank).set(version)
        skew = max(versions.values()) - min(versions.values()) if versions else 0
        self._gauges["weightsync_rank_version_skew"].set(skew)

    def set_engine(self, *, up: bool, fenced: bool, serving: bool) -> None:
        self._gauges["weightsync_engine_up"].set(up)
        self._gauges["weightsync_fenced"].set(fenced)
        self._gauges["weightsync_serving"].set(serving)

    def set_gate(self, report: pb.GateReport) -> None:
        """Show what the last gate has found, and count it."""
        self._families.gates.count(report)
        for name, value in (
            ("k3", report.k3),
            ("mean_abs", report.mean_abs),
            ("max_abs", report.max_abs),
            ("step_k3", report.step_k3),
            ("floor_k3", report.floor_k3),
        ):
            self._gauges[f"weightsync_gate_{name}"].set(value)

    def set_live_checked(self) -> None:
        self._gauges["weightsync_live_check_timestamp_seconds"].set_to_current_time()

    def track_loads(self, up: Callable[[], float], arena_bytes: Callable[[], float]) -> None:
        self._gauges["weightsync_loader_up"].set_function(up)
        self._gauges["weightsync_arena_bytes"].set_function(arena_bytes)

    def remove(self) -> None:
        self.set_served({})
        self._set_cores(set())
        for family in (*self._families.gauges.values(), *self._families.requests.values()):
            family.remove(self._families.model, self._engine)


#: DESIGN section 12, in order.
INVARIANTS = (
    "commit_atomic", "version_immutable", "never_mixed", "stale_writer", "idempotent",
    "acknowledged_kept", "bounded", "no_leak", "time_bounded", "crash_safe", "authority",
    "only_data",
)  # fmt: skip

PAUSE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
LONG_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

#: Phase, buckets, help.
_PHASES = (
    ("receive", LONG_BUCKETS, "Time from the first byte of a push to its last."),
    ("digest", LONG_BUCKETS, "Time to digest one shard."),
    ("persist", LONG_BUCKETS, "Time to write one shard durably."),
    (
        "patch",
        LONG_BUCKETS,
        "Time to make a version of a delta whose bytes are here, and prove it.",
    ),
    ("prepare", LONG_BUCKETS, "Time to map, match and digest a version on all ranks."),
    ("pause", PAUSE_BUCKETS, "Time from the request to pause until the engine is paused."),
    ("commit", PAUSE_BUCKETS, "Time to write parameters, slowest rank."),
    ("verify", PAUSE_BUCKETS, "Time to prove live parameters, slowest rank."),
    ("resume", PAUSE_BUCKETS, "Time from the last proof until the engine runs."),
    ("paused", PAUSE_BUCKETS, "Time without generation during one apply."),
)
PHASES = tuple(name for name, _, _ in _PHASES)

PUSH_OUTCOMES = ("committed", "already", "failed", "aborted")
GATE_OUTCOMES = ("passed", "reported", "rolled_back", "held")
LIVE_CHECK_OUTCOMES = ("passed", "failed", "cancelled")
APPLY_OUTCOMES = ("applied", "already_live", "planned", "refused", "restored", "fenced")
CODINGS = ("unchanged", "gap16", "gap8", "bitmap", "dense")
#: Why a trainer pushed in full, as the proto lists it; the last one is the rest.
FALLBACKS = (
    "first", "no_room", "new_run", "base_mismatch", "layout_changed", "too_dense", "copied",
    "other",
)  # fmt: skip

disable_created_metrics()  # type: ignore[no-untyped-call]  # the library annotates no return


class Metrics:
    """Counts and times of one server, whose `model` is the only value of the label `model`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.bounds = DeadlineMonitor()
        self._model = model
        self._phases = {
            phase: self.histogram(f"weightsync_{phase}_duration_seconds", text, buckets)
            for phase, buckets, text in _PHASES
        }
        self._pushes = self.counters(
            "weightsync_pushes_total", "Pushes ended.", "outcome", PUSH_OUTCOMES
        )
        self._applies = self.counters(
            "weightsync_applies_total", "Applies ended.", "outcome", APPLY_OUTCOMES
        )
        self._live_checks = self.counters(
            "weightsync_live_checks_total",
            "Comparisons of all live parameters after an apply that wrote only what changes.",
            "outcome",
            LIVE_CHECK_OUTCOMES,
        )
        self._received = self.counter(
            "weightsync_received_bytes_total", "Bytes of shards received."
        )
        self._cast = self.counter(
            "weightsync_cast_tensors_total",
            "Tensors of committed versions that were cast to the dtype that the engine has.",
        )
        self._written = self.counter(
            "weightsync_applied_bytes_total", "Bytes written into live parameters, over all ranks."
        )
        self._restarts = self.counter(
            "weightsync_fetcher_restarts_total", "Fetcher processes started again."
        )
        self._ingest_restarts = self.counter(
            "weightsync_ingest_restarts_total", "Ingest processes started again."
        )
        self._dropped_spans = self.counter(
            "weightsync_dropped_spans_total", "Spans of traces that no collector took."
        )
        self._violations = Counter(
            "weightsync_invariant_violations_total",
            "Violations of an invariant; page on any.",
            ["invariant"],
            registry=self.registry,
        )
        for invariant in INVARIANTS:
            self._violations.labels(invariant)
        self.deltas = DeltaMetrics(self)
        self.loaders = LoaderMetrics(self)
        self._state()
        self._build_info()

    def _build_info(self) -> None:
        build = {
            "version": __version__,
            "python": platform.python_version(),
            "grpc": grpc.__version__,
            "protobuf": google.protobuf.__version__,
            "machine": platform.machine(),
        }
        info = Gauge("weightsync_build_info", "1.", list(build), registry=self.registry)
        info.labels(**build).set(1)

    def _state(self) -> None:
        self._engines = EngineGauges(self._model, self.registry, GateMetrics(self))
        self._last_apply = self.gauge(
            "weightsync_last_apply_timestamp_seconds", "When the last apply succeeded, Unix time."
        )

    def histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        histogram = Histogram(name, text, ["model"], buckets=tuple(buckets), registry=self.registry)
        return histogram.labels(self._model)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model"], registry=self.registry).labels(self._model)

    def counters(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> Mapping[str, Counter]:
        family = Counter(name, text, ["model", label], registry=self.registry)
        return {value: family.labels(self._model, value) for value in values}

    def gauges(
        self, name: str, text: str, label: str, values: Iterable[str]
    ) -> Mapping[str, Gauge]:
        family = Gauge(name, text, ["model", label], registry=self.registry)
        return {value: family.labels(self._model, value) for value in values}

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model"], registry=self.registry).labels(self._model)

    def observe_phase(self, phase: str, seconds: float) -> None:
        self._phases[phase].observe(seconds)

    def count_push(self, outcome: str) -> None:
        self._pushes[outcome].inc()

    def count_apply(self, outcome: str) -> None:
        self._applies[outcome].inc()
        if outcome == "applied":
            self._last_apply.set(clock.wall())

    def count_delta(self, counts: DeltaCounts) -> None:
        self.deltas.count(counts)

    def count_fallback(self, reason: str) -> None:
        self.deltas.count_fallback(reason)

    def count_live_check(self, outcome: str) -> None:
        self._live_checks[outcome].inc()

    def count_cast(self, tensors: int) -> None:
        self._cast.inc(tensors)

    def add_received(self, size: int) -> None:
        self._received.inc(size)

    def add_written(self, size: int) -> None:
        self._written.inc(size)

    def count_fetcher_restart(self) -> None:
        self._restarts.inc()

    def count_ingest_restart(self) -> None:
        self._ingest_restarts.inc()

    def count_dropped_spans(self, spans: int) -> None:
        """Count them; also called from the thread that sends spans."""
        self._dropped_spans.inc(spans)

    def violate(self, invariant: str) -> None:
        """Count a violation of one of `INVARIANTS`; the log outlives this process."""
        named = event("invariant.violated", invariant=invariant)
        logger.critical("invariant %s was violated", invariant, extra=named)
        self._violations.labels(invariant).inc()

    def violations(self) -> dict[str, int]:
        values = {name: self._violations.labels(name) for name in INVARIANTS}
        return {name: int(child._value.get()) for name, child in values.items()}  # noqa: SLF001 - the library offers no other way to read a counter

    def engine(self, name: str) -> EngineMetrics:
        return EngineMetrics(self._engines, name)

    def track(self, name: str, text: str, read: Callable[[], float]) -> None:
        self.gauge(name, text).set_function(read)

    def track_served_age(self, commit_time_ns: Callable[[], int]) -> None:
        """Add the age of the served version, in seconds since its commit; 0 while there is none."""

        def age() -> float:
            committed = commit_time_ns()
            return max(0.0, clock.wall() - committed / 1e9) if committed else 0.0

        self.track(
            "weightsync_served_age_seconds", "Time since the served version was committed.", age
        )


class DeltaMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._bytes = metrics.counter(
            "weightsync_delta_bytes_total", "Bytes of the shards of committed deltas."
        )
        self._dense = metrics.counter(
            "weightsync_delta_dense_bytes_total", "Bytes of the same versions in full."
        )
        self._folds = metrics.counter(
            "weightsync_delta_folds_total", "Deltas that are kept in full now."
        )
        self._tensors = metrics.counters(
            "weightsync_delta_tensors_total",
            "Tensors of committed deltas, by how they were sent.",
            "coding",
            CODINGS,
        )
        self._fallbacks = metrics.counters(
            "weightsync_delta_fallbacks_total",
            "Full pushes instead of deltas, by reason.",
            "reason",
            FALLBACKS,
        )
        self._fraction = metrics.gauge(
            "weightsync_delta_changed_fraction",
            "Share of the elements that the newest delta changed.",
        )

    def count(self, counts: DeltaCounts) -> None:
        self._bytes.inc(counts.delta_bytes)
        self._dense.inc(counts.dense_bytes)
        self._fraction.set(counts.fraction)
        for coding, tensors in counts.codings.items():
            self._tensors[coding].inc(tensors)

    def count_fallback(self, reason: str) -> None:
        self._fallbacks[reason if reason in FALLBACKS else FALLBACKS[-1]].inc()

    def count_fold(self) -> None:
        self._folds.inc()


class LoaderMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram(
            "weightsync_load_seconds",
            "Time to load one version beside generation, slowest rank.",
            LONG_BUCKETS,
        )
        self._restarts = metrics.counter(
            "weightsync_loader_restarts_total", "Loaders started again, over all ranks."
        )

    def count(self, seconds: float, restarts: int) -> None:
        """Count a load that every rank has ended.

        `seconds` are the slowest rank's, or 0 if nothing had to be loaded; `restarts` counts
        loaders started again since the load before.
        """
        if seconds:
            self._seconds.observe(seconds)
        self._restarts.inc(restarts)


class GateMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram(
            "weightsync_gate_seconds", "Time to score the probes of a version.", PAUSE_BUCKETS
        )
        self._nan = metrics.counter(
            "weightsync_gate_nan_total",
            "Log probabilities of probes that are no numbers, or infinite.",
        )
        self._outcomes = metrics.counters(
            "weightsync_gates_total", "Gates ended.", "outcome", GATE_OUTCOMES
        )

    def count(self, report: pb.GateReport) -> None:
        outcome = pb.GateOutcome.Name(report.outcome).removeprefix("GATE_OUTCOME_").lower()
        self._outcomes[outcome].inc()
        self._nan.inc(report.nan)
        self._seconds.observe(report.took.ToNanoseconds() / 1e9)
