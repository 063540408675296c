"""Probes go with a push, a gate with an apply, and what it has shown comes back and is printed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from weightsync.errors import WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import (
    AbortedError,
    AsyncClient,
    Client,
    Gate,
    GateAction,
    GateOutcome,
    GateReport,
    GateWhen,
    InvalidError,
    Probes,
    Reason,
    Serving,
    types,
)
from weightsync_client.cli import render
from weightsync_client.rpc import convert

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.client.conftest import Run
    from tests.unit.client.servicer import Running, Servicer

PROBES = Probes([[1, 2, 3], [4, 5]], [[-0.5, -1.5], [-2.5]])


def _state(value: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.full(1000, value, np.float32)}


def _commits(servicer: Servicer) -> list[pb.CommitPushRequest]:
    return [one for one in servicer.requests if isinstance(one, pb.CommitPushRequest)]


def _report(outcome: int = pb.GATE_OUTCOME_PASSED, **more: Any) -> pb.GateReport:
    facts: dict[str, Any] = {"version": 7, "when": pb.GATE_WHEN_BEFORE, "probes": 2, "tokens": 3}
    facts |= {"k3": 8e-5, "mean_abs": 0.0074, "max_abs": 0.12, "k3_limit": 0.001, "floor_k3": 9e-5}
    report = pb.GateReport(outcome=outcome, **facts | more)  # type: ignore[arg-type] # a number
    report.took.FromMilliseconds(25)
    return report


# With a push.


def test_each_kind_of_push_commits_its_probes(client: Client, servicer: Servicer) -> None:
    client.push(_state(1), probes=PROBES)
    changed = _state(1)
    changed["w"][3] = 2
    assert client.push(changed, probes=PROBES, delta="require").kind == "delta"
    client.push_async(_state(3), probes=PROBES).committed.result()
    client.push(iter(_state(4).items()), probes=PROBES)
    client.push(changed, partial=True, probes=PROBES)
    assert [one.probes for one in _commits(servicer)] == [PROBES.to_message()] * 5
    client.push(_state(5))
    assert not _commits(servicer)[-1].HasField("probes")
    assert client.probes(1) == PROBES
    assert client.probes(6) is None
    assert [one.probe_count for one in client.versions()] == [0, 2, 2, 2, 2, 2]


async def test_asyncio_s_pushes_commit_them_too(running: Running, servicer: Servicer) -> None:
    async with AsyncClient(running.address) as client:
        await client.push(_state(), probes=PROBES)
        assert await client.probes(1) == PROBES
    assert _commits(servicer)[0].probes == PROBES.to_message()


@pytest.mark.parametrize("wrong", [[[1, 2]], {"tokens": [1, 2]}, "file"])
def test_what_are_no_probes_is_refused_before_anything_is_sent(
    client: Client, servicer: Servicer, wrong: Any
) -> None:
    with pytest.raises(InvalidError, match=r"probes is .*; use Probes\(...\), Probes.of"):
        client.push(_state(), probes=wrong)
    assert "BeginPush" not in servicer.calls


def test_a_held_version_is_no_base_of_a_part(client: Client, servicer: Servicer) -> None:
    client.push(_state(1))
    client.push(_state(2))
    client.apply(1)
    info = servicer._info

    def held(upload: Any) -> pb.VersionInfo:
        found = info(upload)
        if upload.version == 2:
            found.serving = pb.SERVING_HELD
        return found

    servicer._info = held  # type: ignore[method-assign]
    assert client.versions()[0].serving is Serving.HELD
    assert client.push(_state(3), partial=True).base_version == 1


# With an apply.


def test_an_apply_asks_for_its_gate(client: Client, servicer: Servicer) -> None:
    client.push(_state())
    gate = Gate("before", "hold", 0.002, 0.1, 2.5, each_engine=True)
    client.apply(1, gate=gate)
    asked = servicer.requests[-1].gate
    assert (asked.when, asked.on_fail) == (pb.GATE_WHEN_BEFORE, pb.GATE_ACTION_HOLD)
    assert (asked.k3_limit, asked.step_k3_limit, asked.each_engine) == (0.002, 0.1, True)
    assert asked.time_limit.ToMilliseconds() == 2500
    client.apply(1, gate=Gate(GateWhen.AFTER, GateAction.REPORT))
    expected = pb.GateOptions(when=pb.GATE_WHEN_AFTER, on_fail=pb.GATE_ACTION_REPORT)
    assert servicer.requests[-1].gate == expected
    client.apply(1, gate=Gate())
    assert servicer.requests[-1].gate == pb.GateOptions(on_fail=pb.GATE_ACTION_ROLL_BACK)
    # An older server refuses any.
    client.apply(1)
    assert not servicer.requests[-1].HasField("gate")


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("before", r"gate is 'before'; use Gate\(...\)"),
        (Gate("now"), "gate.when is 'now'; use one of auto, off, before, after"),
        (Gate(on_fail="stop"), "gate.on_fail is 'stop'; use one of roll_back, hold, report"),
        (Gate(k3_limit=0), "gate.k3_limit is 0; use a number above 0, or None"),
        (Gate(k3_limit=float("nan")), "gate.k3_limit is nan; use a number above 0, or None"),
        (Gate(step_k3_limit=-1), "gate.step_k3_limit is -1; use a number above 0, or None"),
        (Gate(time_limit_s=-1), "gate.time_limit_s is -1; use seconds"),
        (Gate(each_engine=1), "gate.each_engine is 1; use True or False"),  # type: ignore[arg-type]
    ],
)
def test_gates_that_cannot_be_are_refused_here(
    client: Client, servicer: Servicer, gate: Any, message: str
) -> None:
    with pytest.raises(InvalidError, match=message):
        client.apply(1, gate=gate)
    assert "ApplyVersion" not in servicer.calls


def test_what_it_has_shown_is_in_the_report(client: Client, servicer: Servicer) -> None:
    client.push(_state())
    assert client.apply(1).gate is None
    servicer.gate = _report(pb.GATE_OUTCOME_REPORTED, reason="over", nan=4, worst_probe=1)
    servicer.gate.step_k3, servicer.gate.step_k3_limit = 0.43, 0.1
    report = client.apply(1)
    assert report.gate == GateReport(
        outcome=GateOutcome.REPORTED,
        reason="over",
        version=7,
        when=GateWhen.BEFORE,
        probes=2,
        tokens=3,
        nan=4,
        k3=8e-5,
        mean_abs=0.0074,
        max_abs=0.12,
        k3_limit=0.001,
        floor_k3=9e-5,
        step_k3=0.43,
        step_k3_limit=0.1,
        worst_probe=1,
        took_s=0.025,
    )
    servicer.gate.ClearField("step_k3")
    report = client.apply(1)
    assert report.gate is not None
    assert report.gate.step_k3 is None


def test_a_restored_apply_has_the_figures_for_programs(client: Client, servicer: Servicer) -> None:
    def refuse(method: str, _request: Any) -> None:
        if method == "ApplyVersion":
            raise WeightSyncError(
                Reason.APPLY_RESTORED, "41 is served again", metadata={"gate_k3": "0.034"}
            )

    client.push(_state())
    servicer.before = refuse
    with pytest.raises(AbortedError) as caught:
        client.apply(1, gate=Gate("before"))
    assert caught.value.reason is Reason.APPLY_RESTORED
    assert caught.value.metadata["gate_k3"] == "0.034"


def test_verify_scores_where_it_is_asked_to(client: Client, servicer: Servicer) -> None:
    client.push(_state())
    client.apply(1)
    servicer.gate = _report()
    assert not client.verify(1).engines
    (proof,) = client.verify(1, score=True).engines
    assert servicer.requests[-1].score
    assert proof.gate is not None
    assert proof.gate.outcome is GateOutcome.PASSED


# By commands.


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(_state(), path)
    return path


def test_push_sends_a_file_of_probes(
    run: Run, servicer: Servicer, weights: Path, tmp_path: Path
) -> None:
    PROBES.save(tmp_path / "probes.json")
    assert run("push", weights, "--probes", tmp_path / "probes.json")[0] == 0
    assert _commits(servicer)[0].probes == PROBES.to_message()
    assert " committed staged 2 probes" in run("versions")[1]
    code, _, err = run("push", weights, "--probes", weights)
    assert code == 2
    assert err.startswith("weightsync: give a file as Probes.save writes it")


def test_apply_asks_for_the_gate_of_its_options(
    run: Run, servicer: Servicer, weights: Path
) -> None:
    run("push", weights)
    run("apply", "1")
    assert not servicer.requests[-1].HasField("gate")
    code, out, _ = run(
        "apply", "1", "--gate", "before", "--on-fail", "hold", "--k3-limit", "0.01",
        "--step-k3-limit", "0.1", "--gate-time", "3", "--gate-all",
    )  # fmt: skip
    assert code == 0
    expected = pb.GateOptions(
        when=pb.GATE_WHEN_BEFORE,
        on_fail=pb.GATE_ACTION_HOLD,
        k3_limit=0.01,
        step_k3_limit=0.1,
        each_engine=True,
    )
    expected.time_limit.FromSeconds(3)
    assert servicer.requests[-1].gate == expected
    assert "gate" not in out
    assert run("apply", "1", "--gate", "now")[0] == 2


def test_accept_takes_what_a_gate_refused(run: Run, servicer: Servicer, weights: Path) -> None:
    run("push", weights)
    run("apply", "1", "--accept")
    asked = servicer.requests[-1]
    assert asked.clear_rejected
    assert asked.gate == pb.GateOptions(on_fail=pb.GATE_ACTION_REPORT)
    run("apply", "1", "--accept", "--on-fail", "hold")
    asked = servicer.requests[-1]
    assert asked.clear_rejected
    assert asked.gate == pb.GateOptions(on_fail=pb.GATE_ACTION_HOLD)


def test_apply_tells_what_its_gate_has_shown(run: Run, servicer: Servicer, weights: Path) -> None:
    run("push", weights)
    servicer.gate = _report()
    assert run("apply", "1")[1].splitlines()[1] == (
        "gate before passed; 2 probes in 25.0 ms; k3 8e-05 (limit 0.001, median 9e-05) over 3 "
        "tokens, |d| 0.0074, at most 0.12"
    )
    servicer.gate = _report(pb.GATE_OUTCOME_REPORTED, reason="over", nan=4, worst_probe=1, tokens=0)
    servicer.gate.step_k3, servicer.gate.step_k3_limit = 0.43, 0.1
    assert run("apply", "1")[1].splitlines()[1] == (
        "gate before reported: over; 2 probes in 25.0 ms; step k3 0.43 (limit 0.1); 4 are no "
        "numbers; worst probe 1"
    )
    document = json.loads(run("apply", "1", "--json")[1])
    assert document["gate"]["step_k3"] == 0.43
    # Where nothing was scored no probe is the worst one.
    servicer.gate = _report(pb.GATE_OUTCOME_REPORTED, reason="late", tokens=0, worst_probe=0)
    assert run("apply", "1")[1].splitlines()[1] == "gate before reported: late; 2 probes in 25.0 ms"


def test_gate_scores_what_is_live_and_tells_by_its_exit_code(
    run: Run, servicer: Servicer, weights: Path
) -> None:
    run("push", weights)
    run("apply", "1")
    code, out, _ = run("gate")
    assert code == 0
    assert out.splitlines()[1].endswith("it has no probes; push with --probes")
    servicer.gate = _report()
    code, out, _ = run("gate", "1")
    assert code == 0
    head, line = out.splitlines()
    assert head.split()[:5] == ["engine", "version", "outcome", "k3", "limit"]
    assert line.split()[:5] == ["e0", "7", "passed", "8e-05", "0.001"]
    servicer.gate = _report(pb.GATE_OUTCOME_REPORTED, reason="over the limit")
    code, out, _ = run("gate")
    assert code == 6
    assert out.splitlines()[1].endswith("over the limit")
    code, out, _ = run("gate", "--json")
    assert code == 6
    assert json.loads(out)["engines"][0]["gate"]["outcome"] == "reported"
    servicer.gate = _report()
    code, out, _ = run("gate", "2")
    assert code == 6
    assert "a rank does NOT hold version 2" in out


def test_status_and_history_show_the_last_gates(capsys: pytest.CaptureFixture[str]) -> None:
    engine = pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, kind="bridge", gate=_report())
    status = pb.GetStatusResponse(models=[pb.ModelStatus(model="m", engine=engine)])
    render.show_status(convert.from_message(types.Status, status))
    assert "  last gate before passed; 2 probes in 25.0 ms; k3" in capsys.readouterr().out
    record = pb.ApplyRecord(number=3, gate=_report(pb.GATE_OUTCOME_ROLLED_BACK, k3=0.034))
    render.show_applies([convert.from_message(types.ApplyRecord, record)])
    head, line = capsys.readouterr().out.splitlines()
    assert "  gate " in head
    assert "rolled back, k3 0.034" in line


@pytest.mark.parametrize(
    ("serving", "shown"), [(pb.SERVING_HELD, "held"), (pb.SERVING_REJECTED, "rejected")]
)
def test_versions_that_are_held_show_it(
    serving: Any, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    info = pb.VersionInfo(model="m", version=7, serving=serving)
    render.show_version(convert.from_message(types.Version, info))
    assert shown in capsys.readouterr().out.split()
