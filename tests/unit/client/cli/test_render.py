"""What the commands print of versions and pushes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import types
from weightsync_client.cli import render
from weightsync_client.rpc import convert
from weightsync_client.types import PushResult

if TYPE_CHECKING:
    from weightsync.v1.weightsync_pb2 import LayoutCheck

_LABELS = [(pb.LAYOUT_CHECK_UNCHECKED, True), (pb.LAYOUT_CHECK_PASSED, False), (0, False)]


@pytest.mark.parametrize(("check", "shown"), _LABELS)
def test_unchecked_is_shown_of_versions_and_pushes(
    check: LayoutCheck.ValueType, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    info = pb.VersionInfo(model="m", version=7, layout_check=check)
    render.show_version(convert.from_message(types.Version, info))
    assert ("unchecked" in capsys.readouterr().out) is shown
    push = pb.PushStatus(push_id="p", version=8, layout_check=check)
    model = pb.ModelStatus(model="m", pushes=[push], apply_id="a1")
    render.show_status(convert.from_message(types.Status, pb.GetStatusResponse(models=[model])))
    out = capsys.readouterr().out
    assert ("unchecked" in out) is shown
    assert "apply a1 in progress" in out


_RUNNING = [
    (["e"], "version 6 -> 7, prepare for 1.5 s (begun 2.0 s ago); not done: rank 0/0/1, 0/0/3"),
    (["d", "e"], "version 6 -> 7, prepare of engine e for 1.5 s (begun 2.0 s ago); not done: rank"),
]


@pytest.mark.parametrize(("engines", "shown"), _RUNNING)
def test_how_far_an_apply_is(
    engines: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running = pb.RunningApply(apply_id="a1", engine="e", version=7, previous_version=6)
    running.phase, running.pending_ranks[:] = pb.RUNNING_PHASE_PREPARE, ["0/0/1", "0/0/3"]
    running.took.FromMilliseconds(2000)
    running.in_phase.FromMilliseconds(1500)
    named = [pb.EngineStatus(name=name, state=pb.ENGINE_STATE_APPLYING) for name in engines]
    model = pb.ModelStatus(model="m", engines=named, apply_id="a1", running_apply=running)
    status = convert.from_message(types.Status, pb.GetStatusResponse(models=[model]))
    render.show_status(status)
    assert f"  apply a1 in progress: {shown}" in capsys.readouterr().out
    assert set(render.PHASES) == set(types.RunningPhase)
    render.show_json(status)
    (document,) = json.loads(capsys.readouterr().out)["models"]
    assert document["running_apply"]["phase"] == "prepare"
    assert document["running_apply"]["in_phase_s"] == 1.5


def test_a_full_disk_is_shown_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    room = pb.DiskStatus(folder="state", path="/s", free_bytes=3 * 10**9, used_bytes=10**6)
    full = pb.DiskStatus(folder="store", path="/d", used_bytes=500, error="free space there")
    render.show_status(convert.from_message(types.Status, pb.GetStatusResponse(disks=[room, full])))
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  disk of state (/s): 3.0 GB free, 1.0 MB used",
        "  disk of store (/d): 0 B free, 500 B used; FULL: free space there",
    ]


def _shown(rank: pb.RankResult, capsys: pytest.CaptureFixture[str]) -> str:
    engine = pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, ranks=[rank])
    model = pb.ModelStatus(model="m", engine=engine)
    render.show_status(convert.from_message(types.Status, pb.GetStatusResponse(models=[model])))
    return capsys.readouterr().out


def test_a_rank_shows_what_its_loader_does(capsys: pytest.CaptureFixture[str]) -> None:
    loader = pb.LoaderStatus(
        state=pb.LOADER_STATE_LOADING, version=7, percent=40, arena_bytes=3 << 20, restarts=2
    )
    loader.load.FromMilliseconds(1500)
    reason = "vLLM computes these from the weights: q"
    rank = pb.RankResult(
        rank="0/0/1", version=6, transform=pb.TRANSFORM_TWIN, transform_reason=reason, loader=loader
    )
    out = _shown(rank, capsys)
    assert f"versions are loaded beside generation ({reason})" in out
    assert "loader loading version 7, 40 %" in out
    assert "last load 1.5 s, started again 2 times" in out
    assert "last failure" not in out
    loader.state, loader.last_error = pb.LOADER_STATE_FAILED, "rank 0/0/1 failed: out of memory"
    rank = pb.RankResult(rank="0/0/1", transform=pb.TRANSFORM_TWIN, loader=loader)
    out = _shown(rank, capsys)
    assert "loader failed version 7, " in out
    assert "40 %" not in out, "of a load that has ended"
    assert "(the reason is no longer known)" in out, "an earlier server knew it"
    assert "last failure: rank 0/0/1 failed: out of memory" in out


def test_a_rank_without_a_loader_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    rank = pb.RankResult(rank="0/0/0", version=6, transform=pb.TRANSFORM_PLAN)
    assert "loader" not in _shown(rank, capsys)


def test_every_rank_of_the_engine_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [pb.RankResult(rank=f"{core}/0/0", version=7) for core in range(2)]
    engine = pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, ranks=ranks)
    model = pb.ModelStatus(model="m", engine=engine)
    render.show_status(convert.from_message(types.Status, pb.GetStatusResponse(models=[model])))
    out = capsys.readouterr().out
    assert "  rank 0/0/0: version 7" in out
    assert "  rank 1/0/0: version 7" in out


def test_what_makes_an_engine_less_safe_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    engine = pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, warnings=["anybody may call it"])
    model = pb.ModelStatus(model="m", engine=engine)
    render.show_status(convert.from_message(types.Status, pb.GetStatusResponse(models=[model])))
    assert "  WARNING anybody may call it\n" in capsys.readouterr().out


def test_a_push_shows_for_which_writers_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    push = pb.PushStatus(push_id="p", writers=4, absent_writers=[1, 3], unfinished_writers=[0])
    model = pb.ModelStatus(model="m", pushes=[push])
    render.show_status(convert.from_message(types.Status, pb.GetStatusResponse(models=[model])))
    assert "0 streams, 4 writers, not begun: 1, 3, unfinished: 0\n" in capsys.readouterr().out


def _status(capsys: pytest.CaptureFixture[str], **fields: Any) -> list[str]:
    model = pb.ModelStatus(model="m", **fields)
    render.show_status(convert.from_message(types.Status, pb.GetStatusResponse(models=[model])))
    return capsys.readouterr().out.splitlines()[1:]


def test_each_of_several_engines_is_shown_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    serving = pb.EngineStatus(
        name="e0", state=pb.ENGINE_STATE_SERVING, kind="bridge", vllm_version="0.26",
        live_version=7, rollback_version=6, ranks=[pb.RankResult(rank="0/0/0", version=7)],
    )  # fmt: skip
    fenced = pb.EngineStatus(
        name="e1", state=pb.ENGINE_STATE_FENCED, kind="bridge", reason="rank 0/0/0 differs",
        rollback_version=5, warnings=["anybody may call it"],
    )  # fmt: skip
    shown = _status(capsys, newest_version=8, engine=fenced, engines=[serving, fenced])
    assert shown == [
        "model m: live 7, newest 8, rollback to 5 and 6",
        "  engine e0: version 7, serving bridge vLLM 0.26",
        "    rank 0/0/0: version 7 ",
        "  engine e1: version none, fenced (rank 0/0/0 differs) bridge",
        "    WARNING anybody may call it",
    ]


def test_a_host_with_one_engine_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    one = pb.EngineStatus(name="engine", state=pb.ENGINE_STATE_SERVING, kind="bridge")
    shown = _status(capsys, live_version=7, rollback_version=6, engine=one, engines=[one])
    assert shown == [
        "model m: live 7, newest none, rollback to 6 (from the store)",
        "  engine serving bridge",
    ]
    assert _status(capsys) == [
        "model m: live none, newest none, rollback to none",
        "  no engine",
    ]


def _report(outcome: pb.ApplyOutcome.ValueType, paused_ms: int = 0) -> pb.ApplyReport:
    report = pb.ApplyReport(
        outcome=outcome, version=8, ranks=[pb.RankResult(rank="0/0/0", version=8)]
    )
    report.phases.paused_total.FromMilliseconds(paused_ms)
    return report


def test_an_apply_shows_what_became_of_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    engines = [
        pb.EngineReport(engine="e0", report=_report(pb.APPLY_OUTCOME_APPLIED, 12)),
        pb.EngineReport(engine="e1", report=_report(pb.APPLY_OUTCOME_ALREADY_LIVE)),
        pb.EngineReport(engine="e2", absent="it does not answer"),
    ]
    whole = _report(pb.APPLY_OUTCOME_APPLIED, 12)
    render.show_apply(convert.to_report(whole, engines))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("version 8 is live (before: none); paused 12.0 ms")
    assert shown[1:] == [
        "  engine e0: applied, paused 12.0 ms",
        "    rank 0/0/0: version 8 ",
        "  engine e1: already live",
        "  engine e2 took no part: it does not answer",
    ]
    render.show_apply(convert.to_report(whole, engines[:1]))
    assert capsys.readouterr().out.splitlines()[1:] == ["  rank 0/0/0: version 8 "], "one engine"


def test_an_apply_names_all_versions_that_were_left(capsys: pytest.CaptureFixture[str]) -> None:
    engines = []
    for at, before in enumerate((6, 7, 6)):
        report = _report(pb.APPLY_OUTCOME_APPLIED)
        report.previous_version = before
        engines.append(pb.EngineReport(engine=f"e{at}", report=report))
    stays = pb.ApplyReport(outcome=pb.APPLY_OUTCOME_ALREADY_LIVE, version=8, previous_version=8)
    engines.append(pb.EngineReport(engine="e3", report=stays))
    render.show_apply(convert.to_report(_report(pb.APPLY_OUTCOME_APPLIED), engines))
    assert "version 8 is live (before: 6 and 7); " in capsys.readouterr().out


def test_a_proof_shows_what_each_engine_holds(capsys: pytest.CaptureFixture[str]) -> None:
    differs = pb.RankResult(rank="0/0/0", error="differs in a")
    proof = pb.VerifyVersionResponse(
        engines=[
            pb.EngineProof(engine="e0", verified=True, version=8),
            pb.EngineProof(engine="e1", version=7, ranks=[differs]),
        ]
    )
    render.show_verification(convert.from_message(types.Verification, proof))
    assert capsys.readouterr().out.splitlines() == [
        "engine e0: every rank holds version 8",
        "engine e1: every rank does NOT hold version 7",
        "  rank 0/0/0: no whole version : differs in a",
    ]


def test_a_push_does_not_tell_that_the_command_before_was_another_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts: dict[str, Any] = {"size_bytes": 6, "tensor_count": 3, "sent_bytes": 6, "seconds": 1.0}
    pushed = PushResult(
        4, "c", "m", durable=True, already=False, other_run="h-1", other_version=3, **facts
    )
    render.show_push(pushed)
    assert "h-1" not in capsys.readouterr().out


def _run(name: str, versions: int, newest: int, **fields: bool) -> pb.ClientRun:
    return pb.ClientRun(client_run=name, versions=versions, newest_version=newest, **fields)


def test_runs_of_one_version_are_shown_when_they_are_the_newest_or_have_the_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # As a shell loop makes them.
    singles = [_run(f"r{number}", 1, number) for number in (9, 8, 7)]
    assert not [line for line in _status(capsys, client_runs=singles) if " run " in line]
    runs = [*singles, _run("loop", 3, 6), _run("owner", 1, 3, has_epoch=True)]
    assert [line for line in _status(capsys, client_runs=runs) if " run " in line] == [
        "  run r9: 1 versions, newest 9",
        "  run loop: 3 versions, newest 6",
        "  run owner: 1 versions, newest 3, has the epoch",
    ]


def test_a_push_shows_what_was_cast(capsys: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = {"size_bytes": 6, "tensor_count": 3, "sent_bytes": 6, "seconds": 1.0}
    for cast in (0, 2):
        pushed = PushResult(4, "c", "m", durable=True, already=False, cast=cast, **facts)
        render.show_push(pushed)
        shown = capsys.readouterr().out
        assert ("cast to what the engine has: 2 tensors" in shown) is bool(cast)
