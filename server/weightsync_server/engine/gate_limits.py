"""What log probabilities say of a version, and whether that is within the limits of its gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from weightsync.v1 import weightsync_pb2 as pb

#: By sequence, of every token but the first.
Scores = Sequence[Sequence[float]]

#: Versions whose k3 make the limit, the factor between their median and it, and its least value.
_HISTORY, _FACTOR, _LEAST = 16, 8.0, 1e-3
#: The limit before there are any.
_FIRST = 2e-3
#: Largest difference that is told apart: beyond it `exp` has no number.
_MAX_EXPONENT = 700.0


@dataclass(frozen=True)
class GateLimits:
    """Largest k3 from the trainer, the median of which it was made (0: none), and of a step.

    A `step_k3` of 0 is no limit.
    """

    k3: float
    floor_k3: float = 0.0
    step_k3: float = 0.0


def limit_of(asked: float, passed: Iterable[float]) -> tuple[float, float]:
    """Return the limit of k3, and the median of which it was made; 0: of none.

    `passed` are the k3 of versions that passed, the newest first.
    """
    last = list(islice(passed, _HISTORY))
    floor = statistics.median(last) if last else 0.0
    return asked or _limit(floor, first=not last), floor


def _limit(floor: float, *, first: bool) -> float:
    return _FIRST if first else max(_LEAST, _FACTOR * floor)


def counts(report: pb.GateReport) -> bool:
    """Whether a version is one of those that make the limit of the next ones.

    One that passed only because somebody named a larger limit would raise it for all of them.
    """
    passed = report.outcome == pb.GATE_OUTCOME_PASSED and report.tokens > 0
    return passed and report.k3 <= _limit(report.floor_k3, first=not report.floor_k3)


@dataclass
class _Differences:
    """Differences of log probabilities, as sums; in double precision."""

    count: int = 0
    k3: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0

    def add(self, d: float) -> None:
        self.count += 1
        self.k3 += math.expm1(min(-d, _MAX_EXPONENT)) + d
        self.absolute += abs(d)
        self.largest = max(self.largest, abs(d))

    def merge(self, other: _Differences) -> None:
        self.count += other.count
        self.k3 += other.k3
        self.absolute += other.absolute
        self.largest = max(self.largest, other.largest)

    @property
    def mean_k3(self) -> float:
        # Of equal ones rounding may leave less than nothing.
        return max(0.0, self.k3 / self.count) if self.count else 0.0

    @property
    def mean_abs(self) -> float:
        return self.absolute / self.count if self.count else 0.0


@dataclass
class _Findings:
    """What all probes together have shown; `scored` counts the engine's log probabilities."""

    scored: int = 0
    nan: int = 0
    trainer: _Differences = field(default_factory=_Differences)
    step: _Differences = field(default_factory=_Differences)
    worst: int = 0
    _worst_rank: tuple[bool, float] = (False, 0.0)

    def add(
        self, index: int, probe: pb.Probe, scores: Sequence[float], before: Sequence[float] | None
    ) -> None:
        start = probe.start or 1
        bad = sum(not math.isfinite(one) for one in scores)
        compared = _differences(probe.logprobs, scores[start - 1 :])
        if before is not None:
            self.step.merge(_differences(before[start - 1 :], scores[start - 1 :]))
        self.scored += len(scores)
        self.nan += bad
        self.trainer.merge(compared)
        # The first that is no number comes before all that differ.
        rank = bool(bad), 0.0 if bad else compared.mean_k3
        if rank > self._worst_rank:
            self.worst, self._worst_rank = index, rank


def _differences(reference: Sequence[float], scores: Sequence[float]) -> _Differences:
    found = _Differences()
    for one, score in zip(reference, scores, strict=False):
        if math.isfinite(one) and math.isfinite(score):
            found.add(one - score)
    return found


def judge(
    version: int,
    probes: pb.Probes,
    scores: Scores,
    baseline: Scores | None,
    limits: GateLimits,
    previous: int = 0,
) -> pb.GateReport:
    """Return what scores show; `reason` says which limit is not kept, empty: all are.

    `scores` and `baseline` have each probe's tokens but the first; `baseline` None: what was live,
    the version `previous`, was not scored. The outcome is for the caller.
    """
    found = _Findings()
    for index, probe in enumerate(probes.probes):
        found.add(index, probe, scores[index], baseline[index] if baseline is not None else None)
    compared = found.trainer.count or any(probe.logprobs for probe in probes.probes)
    report = pb.GateReport(
        version=version,
        probes=len(probes.probes),
        tokens=found.trainer.count,
        nan=found.nan,
        k3=found.trainer.mean_k3,
        mean_abs=found.trainer.mean_abs,
        max_abs=found.trainer.largest,
        k3_limit=limits.k3 if compared else 0.0,
        floor_k3=limits.floor_k3 if compared else 0.0,
        step_k3_limit=limits.step_k3,
        worst_probe=found.worst,
    )
    if found.step.count:
        report.step_k3 = found.step.mean_k3
    report.reason = _reason(report, found.scored, previous)
    return report


def _reason(report: pb.GateReport, scored: int, previous: int) -> str:
    if report.nan:
        return (
            f"{report.nan} of {scored} logprobs of version {report.version} are not numbers (the "
            f"first of probe {report.worst_probe})"
        )
    # Written so that what is no number keeps no limit.
    if report.tokens and not report.k3 <= report.k3_limit:
        return (
            f"version {report.version} answers its probes unlike its trainer (k3 {report.k3:.2g} "
            f"over {report.tokens} tokens, limit {report.k3_limit:.2g}; worst probe "
            f"{report.worst_probe})"
        )
    if report.step_k3_limit and not report.step_k3 <= report.step_k3_limit:
        return (
            f"version {report.version} is {report.step_k3:.2g} from {previous} (step_k3_limit "
            f"{report.step_k3_limit:.2g})"
        )
    return ""


def remedy(report: pb.GateReport) -> str:
    """Return what to do about a report that has a reason."""
    if report.nan:
        return "look for weights that are not numbers, or overflow"
    if report.tokens and not report.k3 <= report.k3_limit:
        return "look for swapped or transposed tensors in the export"
    if report.step_k3_limit and not report.step_k3 <= report.step_k3_limit:
        return "check the trainer's last steps, or raise step_k3_limit"
    return "apply it again with another time_limit or --gate after, or see vLLM's log"
