"""The gate of an apply: the probes of a version are scored, and what they show lets it go or not.

Before the pause: scored on what is live, beside generation. In the pause, when every rank has
proved the version, or behind it: scored on the version, and judged by `gate_limits`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from weightsync.engine import BETWEEN_STEPS, FENCES_ON_EXPIRY, PAUSED_SCORES, SCORES, PauseSpec
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.kept_probes import unpack
from weightsync_server.catalog.record import BY_GATE, VersionRecord
from weightsync_server.catalog.serving import ServingState
from weightsync_server.engine.apply_history import ApplyHistory
from weightsync_server.engine.gate_limits import GateLimits, Scores, counts, judge, limit_of, remedy
from weightsync_server.engine.outcome import CutoverPlan, GatePlan, reject, withhold
from weightsync_server.engine.refusals import GateRefusedError, duration
from weightsync_server.engine.session import EngineSession
from weightsync_server.ops import traces

logger = logging.getLogger(__name__)

_LIMIT_S, _MAX_LIMIT_S = 5.0, 60.0
#: Longest time for the score of what is live, beside generation, seconds.
_BASELINE_S = 30.0
#: How much later than its limit an engine may say that it was too late, seconds.
_GRACE_S = 2.0
#: The outcome of a bad score, by what is asked for then.
_ON_FAIL: Mapping[pb.GateAction.ValueType, pb.GateOutcome.ValueType] = {
    pb.GATE_ACTION_UNSPECIFIED: pb.GATE_OUTCOME_ROLLED_BACK,
    pb.GATE_ACTION_ROLL_BACK: pb.GATE_OUTCOME_ROLLED_BACK,
    pb.GATE_ACTION_HOLD: pb.GATE_OUTCOME_HELD,
    pb.GATE_ACTION_REPORT: pb.GATE_OUTCOME_REPORTED,
}
_REFUSED = frozenset({pb.GATE_OUTCOME_ROLLED_BACK, pb.GATE_OUTCOME_HELD})


def check_gate(options: pb.GateOptions, spec: PauseSpec) -> None:
    """Refuse options that no gate could keep; REQUEST_INVALID names the field."""
    if options.when not in pb.GateWhen.values() or options.on_fail not in pb.GateAction.values():
        raise _invalid(
            "gate.when must be OFF, BEFORE or AFTER, and gate.on_fail ROLL_BACK, HOLD or REPORT"
        )
    for name in ("k3_limit", "step_k3_limit"):
        limit = getattr(options, name)
        if not (math.isfinite(limit) and limit >= 0):
            raise _invalid(f"gate.{name} must be 0 or more, and finite: it is {limit}")
    if not 0 <= options.time_limit.ToNanoseconds() <= _MAX_LIMIT_S * 1e9:
        raise _invalid(f"gate.time_limit must be 0 to {_MAX_LIMIT_S:g} s")
    if options.when == pb.GATE_WHEN_BEFORE and spec.mode == BETWEEN_STEPS:
        raise _invalid(
            "use gate AFTER, or another pause mode: with BETWEEN_STEPS nothing is paused, so that "
            "nothing can be scored before the version is served"
        )


def _invalid(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.REQUEST_INVALID, message)


def pack_options(options: pb.GateOptions) -> str:
    """Return options as a plan of a fleet has them; "": nothing is chosen."""
    return base64.b64encode(options.SerializeToString(deterministic=True)).decode()


def unpack_options(text: str) -> pb.GateOptions:
    """Return what `pack_options` was given; NOT_SUPPORTED: another release wrote it."""
    try:
        return pb.GateOptions.FromString(base64.b64decode(text, validate=True))
    except (ValueError, DecodeError) as error:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED, f"update this member: the plan's gate is not known here ({error})"
        ) from None


@dataclass(frozen=True)
class GatedEngine:
    """An engine that takes a version, by its name, and what it can do."""

    name: str
    capabilities: frozenset[str]

    @property
    def paused(self) -> bool:
        """Whether it scores in a pause that is fenced when its server dies."""
        return {PAUSED_SCORES, FENCES_ON_EXPIRY} <= self.capabilities

    @property
    def scores_live(self) -> bool:
        return SCORES in self.capabilities


def plan_gates(
    options: pb.GateOptions,
    record: VersionRecord,
    engines: Sequence[GatedEngine],
    spec: PauseSpec,
    history: ApplyHistory,
) -> dict[str, GatePlan]:
    """Return the gates of an apply by the name of the engine that scores; others have none.

    `engines` are in the order in which they take the version, at least one. `options` are checked.

    Raises:
        WeightSyncError: REQUEST_INVALID: a gate was asked for, and the version has no probes.
            ENGINE_UNSUPPORTED: an engine cannot do what was asked for.
    """
    probes = unpack(record.commit.probes) if record.commit is not None else None
    asked = options.when
    if asked == pb.GATE_WHEN_OFF or (probes is None and not asked):
        return {}
    if probes is None:
        raise _invalid(f"version {record.version} has no probes; push with probes=, or --gate off")
    scoring = engines if options.each_engine else engines[:1]
    when, absent = _when(asked, scoring, spec)
    if absent:
        logger.info("version %d is not scored: %s", record.version, absent)
    limit_s = options.time_limit.ToNanoseconds() / 1e9 or _LIMIT_S
    return {
        one.name: GatePlan(
            when,
            options.on_fail,
            probes,
            limits_of(options, history, one.name),
            limit_s,
            absent=absent,
        )
        for one in scoring
    }


def limits_of(options: pb.GateOptions, history: ApplyHistory, engine: str) -> GateLimits:
    k3, floor = limit_of(options.k3_limit, passed_k3(history, engine))
    return GateLimits(k3, floor, options.step_k3_limit)


def _when(
    asked: pb.GateWhen.ValueType, scoring: Sequence[GatedEngine], spec: PauseSpec
) -> tuple[pb.GateWhen.ValueType, str]:
    """Return when engines score, or OFF and why they do not although nobody said so."""
    late = next((one.name for one in scoring if not one.paused), "")
    never = next((one.name for one in scoring if not one.scores_live), "")
    if asked == pb.GATE_WHEN_BEFORE and late:
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED,
            f"use --gate after: engine {late} cannot score probes in a pause",
        )
    if asked == pb.GATE_WHEN_AFTER and never:
        raise WeightSyncError(
            Reason.ENGINE_UNSUPPORTED, f"use --gate off: engine {never} cannot score probes"
        )
    if asked:
        return asked, ""
    if not late and spec.mode != BETWEEN_STEPS:
        return pb.GATE_WHEN_BEFORE, ""
    if not never:
        return pb.GATE_WHEN_AFTER, ""
    return pb.GATE_WHEN_OFF, f"engine {never} cannot score probes"


def passed_k3(history: ApplyHistory, engine: str) -> Iterator[float]:
    """Yield the k3 of the versions that count for the limit of an engine, the newest first."""
    for entry in history.newest_first():
        if entry.result != pb.APPLY_RESULT_APPLIED:
            continue
        # A record that was too large names no engines.
        own = entry.engine in ("", engine) and not entry.engines
        reports = [entry.gate] if own else []
        reports += [one.report.gate for one in entry.engines if one.engine == engine]
        for report in reports:
            if counts(report):
                yield report.k3


async def with_baseline(session: EngineSession, plan: CutoverPlan) -> CutoverPlan:
    """Score the probes on what is live, beside generation; a figure that cannot be had is absent.

    It warms the engine up: its first score takes seconds, which would be in the pause.

    Raises:
        WeightSyncError: REQUEST_INVALID: the engine scores no such probes, whatever it holds, and
            the gate would not let any version go for that.
    """
    gate = plan.gate
    if gate is None or gate.when == pb.GATE_WHEN_OFF or SCORES not in session.info.capabilities:
        return plan
    try:
        # Its first score takes an engine seconds, and nobody waits for it but this apply.
        patient = replace(gate, limit_s=max(gate.limit_s, _BASELINE_S))
        scores = await _scored(session, patient, paused=False)
    except WeightSyncError as error:
        if error.reason is Reason.REQUEST_INVALID and gate.on_fail != pb.GATE_ACTION_REPORT:
            raise _invalid(
                f"push version {plan.target.record.version} again with other probes, or apply it "
                f"with --gate off: {error.message}"
            ) from None
        logger.info(
            "version %d was not scored before the apply, so that the step is not known: %s",
            plan.base.record.version,
            error.message,
        )
        return plan
    return replace(plan, gate=replace(gate, baseline=scores))


async def score_target(session: EngineSession, plan: CutoverPlan, engine: str) -> pb.GateReport:
    """Score the probes on the target, which every rank holds, and say how the gate ends.

    In the pause that the session has if the plan is `gated`, else beside generation. That there is
    no score, for whatever reason, is told as a limit that is not kept.
    """
    gate, record = plan.gate, plan.target.record
    if gate is None:
        raise WeightSyncError(Reason.FAULT, "an engine without a gate was to score; apply again")
    began = time.perf_counter()
    with traces.phase("apply.score", engine=engine, version=record.version):
        try:
            scores = await _scored(session, gate, paused=plan.gated)
            baseline, before = gate.baseline, plan.base.record.version
            report = judge(record.version, gate.probes, scores, baseline, gate.limits, before)
        except WeightSyncError as error:
            why = f"the probes of version {record.version} were not scored ({error.message})"
            report = pb.GateReport(version=record.version, reason=why)
            report.probes, report.step_k3_limit = len(gate.probes.probes), gate.limits.step_k3
    report.when = gate.when
    report.took.CopyFrom(duration(time.perf_counter() - began))
    report.outcome = _ON_FAIL[gate.on_fail] if report.reason else pb.GATE_OUTCOME_PASSED
    _log(report, engine)
    return report


async def _scored(session: EngineSession, gate: GatePlan, *, paused: bool) -> Scores:
    sequences = [probe.tokens for probe in gate.probes.probes]
    try:
        async with asyncio.timeout(gate.limit_s + _GRACE_S):
            scores = await session.score(sequences, gate.limit_s, paused=paused)
    except TimeoutError:
        raise WeightSyncError(
            Reason.DEADLINE_EXCEEDED,
            f"the engine did not answer within {gate.limit_s + _GRACE_S:g} s",
        ) from None
    if [len(one) + 1 for one in scores] != [len(tokens) for tokens in sequences]:
        raise WeightSyncError(
            Reason.FAULT, "the engine did not return one number for each token but the first"
        )
    return scores


def _log(report: pb.GateReport, engine: str) -> None:
    outcome = pb.GateOutcome.Name(report.outcome).removeprefix("GATE_OUTCOME_").lower()
    level = logging.ERROR if refuses(report) else logging.WARNING if report.reason else logging.INFO
    logger.log(
        level,
        "gate of version %d on engine %s: %s, k3 %.2g of %d tokens, limit %.2g%s",
        report.version,
        engine,
        outcome,
        report.k3,
        report.tokens,
        report.k3_limit,
        f": {report.reason}" if report.reason else "",
        extra=event("gate.scored", outcome=outcome, k3=report.k3, nan=report.nan),
    )


def refuses(report: pb.GateReport) -> bool:
    """Whether the gate has not let its version go."""
    return report.outcome in _REFUSED


def scored(report: pb.GateReport) -> bool:
    """Whether a limit was not kept by figures, and not because there are none."""
    return bool(report.tokens or report.nan or report.HasField("step_k3"))


def refusal(report: pb.GateReport, base: int) -> GateRefusedError:
    """Return the error of an apply that its gate has undone: `base` is served again."""
    on_hold = report.outcome == pb.GATE_OUTCOME_HELD
    end = "this version is held" if on_hold else "this content is rejected"
    return GateRefusedError(
        f"{report.reason}: version {base} is served again and {end}; {remedy(report)}", report
    )


async def settle(serving: ServingState, report: pb.GateReport) -> None:
    """Reject or hold the version that a gate has not let go."""
    if report.outcome == pb.GATE_OUTCOME_HELD:
        await withhold(serving, report.version, report.reason)
    else:
        await reject(serving, report.version, BY_GATE + report.reason)
