"""What the commands print of versions and pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.cli import render
from weightsync_client.rpc import convert

if TYPE_CHECKING:
    from weightsync.v1.weightsync_pb2 import LayoutCheck

_LABELS = [(pb.LAYOUT_CHECK_UNCHECKED, True), (pb.LAYOUT_CHECK_PASSED, False), (0, False)]


@pytest.mark.parametrize(("check", "shown"), _LABELS)
def test_unchecked_is_shown_of_versions_and_pushes(
    check: LayoutCheck.ValueType, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    info = pb.VersionInfo(model="m", version=7, layout_check=check)
    render.show_version(convert.to_version(info))
    assert ("unchecked" in capsys.readouterr().out) is shown
    push = pb.PushStatus(push_id="p", version=8, layout_check=check)
    model = pb.ModelStatus(model="m", pushes=[push], apply_id="a1")
    render.show_status(convert.to_status(pb.GetStatusResponse(models=[model])))
    out = capsys.readouterr().out
    assert ("unchecked" in out) is shown
    assert "apply a1 in progress" in out


def _shown(rank: pb.RankResult, capsys: pytest.CaptureFixture[str]) -> str:
    engine = pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, ranks=[rank])
    model = pb.ModelStatus(model="m", engine=engine)
    render.show_status(convert.to_status(pb.GetStatusResponse(models=[model])))
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
    assert "(as before)" in out, "an earlier server knew the reason"
    assert "last failure: rank 0/0/1 failed: out of memory" in out


def test_a_rank_without_a_loader_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    rank = pb.RankResult(rank="0/0/0", version=6, transform=pb.TRANSFORM_PLAN)
    assert "loader" not in _shown(rank, capsys)


def test_every_rank_of_the_engine_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [pb.RankResult(rank=f"{core}/0/0", version=7) for core in range(2)]
    engine = pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, ranks=ranks)
    model = pb.ModelStatus(model="m", engine=engine)
    render.show_status(convert.to_status(pb.GetStatusResponse(models=[model])))
    out = capsys.readouterr().out
    assert "  rank 0/0/0: version 7" in out
    assert "  rank 1/0/0: version 7" in out


def test_what_makes_an_engine_less_safe_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    engine = pb.EngineStatus(state=pb.ENGINE_STATE_SERVING, warnings=["anybody may call it"])
    model = pb.ModelStatus(model="m", engine=engine)
    render.show_status(convert.to_status(pb.GetStatusResponse(models=[model])))
    assert "  WARNING anybody may call it\n" in capsys.readouterr().out


def test_a_push_shows_for_which_writers_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    push = pb.PushStatus(push_id="p", writers=4, absent_writers=[1, 3], unfinished_writers=[0])
    model = pb.ModelStatus(model="m", pushes=[push])
    render.show_status(convert.to_status(pb.GetStatusResponse(models=[model])))
    assert "0 streams, 4 writers, not begun: 1, 3, unfinished: 0\n" in capsys.readouterr().out
