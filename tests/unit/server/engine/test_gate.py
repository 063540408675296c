"""The gate of an apply on one engine: when it scores, and what becomes of what it refuses."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import duration_pb2

from tests.unit.server.engine.plant import ENGINE, Engine, Plant, plant, probes, tensors, until
from tests.unit.server.world import MODEL
from weightsync import failpoints
from weightsync.engine import PAUSED_SCORES, SCORES, EngineState, OnExpiry
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.testing import memory_logprobs
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine.journal import Entry
from weightsync_server.engine.reconcile import overruled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

BETWEEN = pb.PauseOptions(mode=pb.PAUSE_MODE_BETWEEN_STEPS)
AFTER = pb.GateOptions(when=pb.GATE_WHEN_AFTER)


async def _undone(it: Plant, version: int = 0, **fields: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(version, **fields)
    assert caught.value.reason is Reason.APPLY_RESTORED, caught.value.message
    return caught.value


async def _refused(it: Plant, reason: Reason, *parts: str, **fields: Any) -> None:
    begun = len(it.engine.events)
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(**fields)
    assert caught.value.reason is reason, caught.value.message
    for part in parts:
        assert part in caught.value.message
    assert "pause" not in it.engine.events[begun:]


def _last(it: Plant) -> pb.ApplyRecord:
    return next(it.keeper.context.history.newest_first())


async def test_a_good_version_is_scored_in_the_pause_and_served(it: Plant) -> None:
    await it.push_probed(2)
    begun = len(it.engine.events)
    report = await it.apply(2)
    assert it.engine.events[begun:] == ["score", "pause", "commit", "score", "resume"]
    gate = report.gate
    assert (gate.outcome, gate.when) == (pb.GATE_OUTCOME_PASSED, pb.GATE_WHEN_BEFORE)
    assert (gate.version, gate.probes, gate.tokens, gate.nan, gate.k3) == (2, 3, 30, 0, 0.0)
    assert (gate.reason, gate.k3_limit, gate.floor_k3) == ("", 2e-3, 0.0)
    # The step is from what the live version said of the same probes.
    pairs = [
        (one, two)
        for probe in probes(2).probes
        for one, two in zip(
            memory_logprobs(tensors(1), probe.tokens)[1:],
            memory_logprobs(tensors(2), probe.tokens)[1:],
            strict=True,
        )
    ]
    wanted = sum(math.exp(two - one) - 1 + one - two for one, two in pairs) / len(pairs)
    assert gate.step_k3 == pytest.approx(wanted)
    assert report.phases.score.ToNanoseconds() == gate.took.ToNanoseconds() > 0
    assert report.phases.paused_total.ToNanoseconds() > gate.took.ToNanoseconds()
    assert it.keeper.status().gate == gate == _last(it).gate
    assert _last(it).phases.score == gate.took
    assert it.count("weightsync_gates_total", outcome="passed") == 1
    assert it.count("weightsync_gate_seconds_count") == 1
    assert it.count("weightsync_gate_step_k3") == gate.step_k3
    assert it.engine.serves == 2


async def test_a_bad_version_never_serves_and_is_rejected(it: Plant) -> None:
    await it.push_probed(2, wrong=1)
    begun = len(it.engine.served)
    error = await _undone(it, 2, idempotency_key="k")
    assert error.message.startswith("version 2 answers its probes unlike its trainer (k3 ")
    assert "worst probe 1): version 1 is served again and this content is rejected; look for" in (
        error.message
    )
    assert error.metadata["gate"] == "rolled_back"
    assert it.engine.served[begun:] == [1]
    assert it.engine.serves == it.here.model.serving.live == 1
    assert it.here.model.table.get(2).serving == pb.SERVING_REJECTED
    assert it.journal.live[0] == 1
    assert it.journal.answered("k") is not None
    gate = _last(it).gate
    assert (gate.outcome, gate.worst_probe) == (pb.GATE_OUTCOME_ROLLED_BACK, 1)
    assert _last(it).result == pb.APPLY_RESULT_RESTORED
    assert it.keeper.status().gate == gate
    assert it.count("weightsync_gates_total", outcome="rolled_back") == 1
    assert it.count("weightsync_gate_k3") == gate.k3 > 2e-3
    # Under no number, until somebody accepts it.
    await it.push_probed(2, version=7)
    await _refused(it, Reason.VERSION_REJECTED, "version 7 is rejected", version=7)
    assert (await it.apply()).outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    report = await it.apply(
        7, clear_rejected=True, gate=pb.GateOptions(on_fail=pb.GATE_ACTION_REPORT)
    )
    assert report.gate.outcome == pb.GATE_OUTCOME_PASSED
    assert it.engine.serves == 2


async def test_a_held_version_waits_for_somebody_to_accept_it(it: Plant) -> None:
    await it.push_probed(2, wrong=0)
    error = await _undone(it, 2, gate=pb.GateOptions(on_fail=pb.GATE_ACTION_HOLD))
    assert error.metadata["gate"] == "held"
    assert "version 1 is served again and this version is held" in error.message
    record = it.here.model.table.get(2)
    assert record.serving == record.to_info().serving == pb.SERVING_HELD
    assert record.residency == pb.RESIDENCY_STAGED
    assert "unlike its trainer" in record.to_info().rejected_reason
    assert (await it.apply()).outcome == pb.APPLY_OUTCOME_ALREADY_LIVE
    await _refused(it, Reason.GATE_HELD, "--accept", "unlike its trainer", version=2)
    await it.push_probed(2, version=3)
    await _refused(it, Reason.GATE_HELD, "--accept", version=3)
    reports = pb.GateOptions(on_fail=pb.GATE_ACTION_REPORT)
    report = await it.apply(2, clear_rejected=True, gate=reports)
    assert report.gate.outcome == pb.GATE_OUTCOME_REPORTED
    assert it.engine.serves == 2
    assert record.hold_reason == ""
    assert it.here.model.table.get(3).serving == pb.SERVING_NO


async def test_a_hold_outlives_the_server(tmp_path: Path, engine: Engine) -> None:
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        await it.push_probed(2, wrong=0)
        await _undone(it, 2, gate=pb.GateOptions(on_fail=pb.GATE_ACTION_HOLD))
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert it.here.model.table.get(2).serving == pb.SERVING_HELD
        assert it.here.model.table.get(2).to_info().probe_count == 3
        await _refused(it, Reason.GATE_HELD, version=2)


async def test_a_report_lets_it_go_and_says_why_it_would_not(it: Plant) -> None:
    await it.push_probed(2, wrong=0)
    report = await it.apply(2, gate=pb.GateOptions(on_fail=pb.GATE_ACTION_REPORT))
    assert report.gate.outcome == pb.GATE_OUTCOME_REPORTED
    assert "unlike its trainer" in report.gate.reason
    assert it.engine.serves == 2
    assert it.here.model.table.get(2).serving == pb.SERVING_LIVE


async def _nan(scores: list[list[float]]) -> list[list[float]]:
    return [[math.nan for _ in one] for one in scores]


async def _slow(scores: list[list[float]]) -> list[list[float]]:
    await asyncio.sleep(60)
    return scores


async def _full(_: list[list[float]]) -> list[list[float]]:
    raise WeightSyncError(Reason.ENGINE_REFUSED, "no key-value block is free for probes")


async def _short(scores: list[list[float]]) -> list[list[float]]:
    return [one[:-1] for one in scores]


@pytest.mark.parametrize(
    ("misbehave", "sentence"),
    [
        (_nan, "33 of 33 logprobs of version 2 are not numbers"),
        (_slow, "the probes of version 2 were not scored (the probes were not scored within"),
        (_full, "the probes of version 2 were not scored (no key-value block is free"),
        (_short, "did not return one number for each token"),
    ],
)
async def test_what_cannot_be_scored_is_not_let_go(
    it: Plant, misbehave: Callable[[Any], Awaitable[Any]], sentence: str
) -> None:
    await it.push_probed(2)
    it.engine.on_score = misbehave
    quick = pb.GateOptions(time_limit=duration_pb2.Duration(nanos=50_000_000))
    error = await _undone(it, 2, gate=quick)
    assert sentence in error.message
    assert it.engine.serves == 1
    assert it.here.model.table.get(2).serving == pb.SERVING_REJECTED
    if misbehave is _nan:
        assert it.count("weightsync_gate_nan_total") == 33


async def test_a_baseline_that_fails_is_absent_and_stops_nothing(it: Plant) -> None:
    await it.push_probed(2)

    def fail_once() -> None:
        del it.engine.before["score"]
        raise WeightSyncError(Reason.ENGINE_REFUSED, "not now")

    it.engine.before["score"] = fail_once
    report = await it.apply(2, gate=pb.GateOptions(step_k3_limit=1e-9))
    assert report.gate.outcome == pb.GATE_OUTCOME_PASSED
    assert not report.gate.HasField("step_k3")


async def test_probes_that_the_engine_cannot_score_are_refused_before_the_pause(it: Plant) -> None:
    await it.push_probed(2)

    def refuse() -> None:
        raise invalid_request("use token ids below 50: probe 0 has 60")

    it.engine.before["score"] = refuse
    what = "push version 2 again with other probes, or apply it with --gate off: use token ids"
    for when in (pb.GATE_WHEN_BEFORE, pb.GATE_WHEN_AFTER):
        options = pb.GateOptions(when=when)
        await _refused(it, Reason.REQUEST_INVALID, what, version=2, gate=options)
    assert it.here.model.table.get(2).serving != pb.SERVING_REJECTED
    assert it.engine.serves == 1
    # A gate that only tells stops nothing.
    report = await it.apply(2, gate=pb.GateOptions(on_fail=pb.GATE_ACTION_REPORT))
    assert report.gate.outcome == pb.GATE_OUTCOME_REPORTED
    assert "use token ids below 50" in report.gate.reason


@pytest.mark.parametrize("wrong", [None, 1])
async def test_an_engine_that_is_lost_says_nothing_of_what_it_did_not_score(
    it: Plant, wrong: int | None
) -> None:
    await it.push_probed(2, wrong=wrong)

    def gone() -> None:
        raise WeightSyncError(Reason.ENGINE_AWAY, "the engine process has died")

    async def die(scores: list[list[float]]) -> list[list[float]]:
        if it.engine.events[-2:] != ["commit", "score"]:
            return scores
        for call in ("commit", "resume", "fence"):
            it.engine.before[call] = gone
        if wrong is None:
            gone()
        return scores

    it.engine.on_score = die
    with pytest.raises(WeightSyncError) as caught:
        await it.apply(2)
    assert caught.value.reason is Reason.ENGINE_FENCED
    # Figures count, also if the engine dies behind them.
    rejected = it.here.model.table.get(2).serving == pb.SERVING_REJECTED
    assert rejected == (wrong is not None)
    assert 2 not in it.engine.served


async def test_a_step_that_is_too_large_is_held(it: Plant) -> None:
    await it.push_probed(2)
    options = pb.GateOptions(step_k3_limit=0.01, on_fail=pb.GATE_ACTION_HOLD)
    error = await _undone(it, 2, gate=options)
    assert "from 1 (step_k3_limit 0.01): version 1 is served again" in error.message


async def test_limits_follow_the_versions_that_passed(it: Plant) -> None:
    await it.push_probed(2)
    await it.push_probed(3)
    it.engine.on_score = _near
    first = (await it.apply(2)).gate
    assert (first.k3_limit, first.floor_k3) == (2e-3, 0.0)
    second = (await it.apply(3)).gate
    assert second.floor_k3 == pytest.approx(first.k3)
    assert second.k3_limit == pytest.approx(8 * first.k3)


async def test_a_limit_that_somebody_named_raises_no_later_one(it: Plant) -> None:
    await it.push_probed(2, wrong=0)
    report = await it.apply(2, gate=pb.GateOptions(k3_limit=1000))
    assert report.gate.outcome == pb.GATE_OUTCOME_PASSED
    await it.push_probed(3, wrong=0)
    error = await _undone(it, 3)
    assert "limit 0.002" in error.message


async def _near(scores: list[list[float]]) -> list[list[float]]:
    return [[one + 0.02 for one in each] for each in scores]


@pytest.mark.parametrize("pause", [None, BETWEEN])
async def test_after_the_resume_a_bad_version_is_taken_back(
    it: Plant, pause: pb.PauseOptions | None
) -> None:
    await it.push_probed(2, wrong=0)
    gate = pb.GateOptions(when=pb.GATE_WHEN_UNSPECIFIED if pause else pb.GATE_WHEN_AFTER)
    error = await _undone(it, 2, gate=gate, pause=pause, idempotency_key="k")
    assert "version 1 is served again and this content is rejected" in error.message
    assert error.metadata["gate"] == "rolled_back"
    assert it.engine.served[-1] == it.engine.serves == it.here.model.serving.live == 1
    assert it.here.model.table.get(2).serving == pb.SERVING_REJECTED
    assert it.journal.live[0] == 1
    assert _last(it).gate.when == pb.GATE_WHEN_AFTER
    answered = it.journal.answered("k")
    assert answered is not None
    assert answered.answer is not None
    assert "unlike its trainer" in answered.answer.refusal


async def test_after_the_resume_a_good_version_stays(it: Plant) -> None:
    await it.push_probed(2)
    begun = len(it.engine.events)
    report = await it.apply(2, gate=AFTER)
    assert it.engine.events[begun:] == ["score", "pause", "commit", "resume", "score"]
    assert report.gate.outcome == pb.GATE_OUTCOME_PASSED
    assert report.phases.score.ToNanoseconds() == 0


async def test_without_probes_nothing_is_scored(it: Plant) -> None:
    await it.push(2, 3)
    begun = len(it.engine.events)
    report = await it.apply(2)
    assert not report.HasField("gate")
    assert "score" not in it.engine.events[begun:]
    sentence = "version 3 has no probes; push with probes=, or --gate off"
    for when in (pb.GATE_WHEN_BEFORE, pb.GATE_WHEN_AFTER):
        gate = pb.GateOptions(when=when)
        await _refused(it, Reason.REQUEST_INVALID, sentence, version=3, gate=gate)
    await it.push_probed(4)
    report = await it.apply(4, gate=pb.GateOptions(when=pb.GATE_WHEN_OFF))
    assert not report.HasField("gate")
    assert "score" not in it.engine.events[begun:]


async def test_what_the_engine_cannot_score_is_said(tmp_path: Path, engine: Engine) -> None:
    engine._abilities.discard(PAUSED_SCORES)
    async with plant(tmp_path, engine) as it:
        await it.ready()
        for seed in (2, 3):
            await it.push_probed(seed)
        before = pb.GateOptions(when=pb.GATE_WHEN_BEFORE)
        sentence = "use --gate after: engine engine cannot score probes in a pause"
        await _refused(it, Reason.ENGINE_UNSUPPORTED, sentence, version=2, gate=before)
        assert (await it.apply(2)).gate.when == pb.GATE_WHEN_AFTER
    engine._abilities.discard(SCORES)
    engine.restart(tensors(1))
    async with plant(tmp_path / "other", engine) as it:
        it.engine._socket = str(tmp_path / "other" / "segments.sock")
        await it.ready()
        await it.push_probed(2)
        await _refused(it, Reason.ENGINE_UNSUPPORTED, "--gate off", version=2, gate=AFTER)
        gate = (await it.apply(2)).gate
        assert (gate.when, gate.outcome) == (pb.GATE_WHEN_OFF, pb.GATE_OUTCOME_UNSPECIFIED)
        assert gate.reason == "engine engine cannot score probes"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"when": 9}, "gate.when must be"),
        ({"on_fail": 9}, "gate.on_fail"),
        ({"k3_limit": -1.0}, "gate.k3_limit must be 0 or more"),
        ({"step_k3_limit": math.nan}, "gate.step_k3_limit must be 0 or more"),
        ({"k3_limit": math.inf}, "finite"),
        ({"time_limit": duration_pb2.Duration(seconds=61)}, "gate.time_limit must be 0 to 60 s"),
        ({"time_limit": duration_pb2.Duration(seconds=-1)}, "gate.time_limit must be 0 to 60 s"),
    ],
)
async def test_options_that_no_gate_could_keep_are_refused(
    it: Plant, options: dict[str, Any], sentence: str
) -> None:
    await it.push_probed(2)
    gate = pb.GateOptions(**options)
    await _refused(it, Reason.REQUEST_INVALID, sentence, version=2, gate=gate)
    before = pb.GateOptions(when=pb.GATE_WHEN_BEFORE)
    sentence = "use gate AFTER, or another pause mode"
    await _refused(it, Reason.REQUEST_INVALID, sentence, version=2, gate=before, pause=BETWEEN)


async def test_a_proof_scores_what_is_live_and_changes_nothing(it: Plant) -> None:
    await it.push_probed(2, wrong=2)
    await it.apply(2, gate=pb.GateOptions(when=pb.GATE_WHEN_OFF))
    begun = len(it.engine.events)
    request = pb.VerifyVersionRequest(model=MODEL, score=True)
    answer = await it.applier.verify(request)
    (proof,) = answer.engines
    assert answer.verified
    assert it.engine.events[begun:] == ["score"]
    assert proof.gate.outcome == pb.GATE_OUTCOME_REPORTED
    assert proof.gate.worst_probe == 2
    assert not proof.gate.HasField("step_k3")
    assert it.engine.serves == 2
    assert it.here.model.table.get(2).serving == pb.SERVING_LIVE
    await it.push(3)
    await it.apply(3)
    with pytest.raises(WeightSyncError, match="version 3 has no probes"):
        await it.applier.verify(request)


async def _at(monkeypatch: pytest.MonkeyPatch, point: str) -> list[str]:
    """Have a server stop working at a failpoint, as if it had died; return where it came to."""
    reached: list[str] = []
    real = failpoints.reach

    async def reach(name: str) -> None:
        await real(name)
        if name == point:
            reached.append(name)
            await asyncio.Event().wait()

    monkeypatch.setattr(failpoints, "reach", reach)
    return reached


@pytest.mark.parametrize(
    ("point", "served"),
    [("gate.score", 1), ("gate.scored", 1), ("gate.decide", 1), ("gate.decided", 2)],
)
async def test_nobody_is_served_by_what_was_not_let_go(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, point: str, served: int
) -> None:
    async with plant(tmp_path, engine, durable=True, pause_lease_s=0.6) as it:
        await it.ready()
        await it.push_probed(2)
        with monkeypatch.context() as dying:
            reached = await _at(dying, point)
            call = asyncio.create_task(it.apply(2, idempotency_key="k"))
            await until(lambda: bool(reached))
            fences = engine._lease.on_expiry is OnExpiry.FENCE
            # Nothing of this server is left but what it has written down.
            begun = len(engine.served)
            for task in it.applier._calls._running:
                task.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await it.keeper.stop()
    assert fences
    await until(lambda: engine._condition is EngineState.FENCED, 5)
    async with plant(tmp_path, engine, durable=True) as it:
        await it.ready()
        assert engine.serves == it.here.model.serving.live == served
        assert engine.served[begun:] == [served]
        report = await it.apply(2, idempotency_key="k")
        assert report.version == engine.serves == 2
        assert it.engine.served[begun:] == sorted({served, 2})


async def test_what_was_not_let_go_is_overruled_also_without_the_version_before(
    it: Plant,
) -> None:
    await it.push_probed(2)
    table = it.here.model.table
    intent = Entry("INTENT", "x", 2, 99, engine=ENGINE, gated=True)
    await it.journal._file.append(intent)
    assert (it.journal.decided, it.journal.refused) == (99, 2)
    assert overruled(it.journal, table, table.get(2))
    assert not overruled(it.journal, table, table.get(1))
    await it.journal._file.append(replace(intent, event="COMMIT"))
    assert (it.journal.decided, it.journal.refused) == (2, 0)
    assert overruled(it.journal, table, table.get(1))
    await it.journal._file.end(intent, None, in_store=False)
    assert (it.journal.decided, it.journal.refused) == (0, 0)


async def test_a_decision_that_the_disk_refuses_is_none(
    it: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.push_probed(2)

    async def reach(name: str) -> None:
        if name == "gate.decide":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(failpoints, "reach", reach)
    error = await _undone(it, 2)
    assert "gate" not in error.metadata
    assert it.engine.serves == 1
    monkeypatch.undo()
    assert it.here.model.table.get(2).serving == pb.SERVING_NO
    assert (await it.apply(2)).outcome == pb.APPLY_OUTCOME_APPLIED
