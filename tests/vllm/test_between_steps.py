"""Two ranks, real processes in a real gloo group, that switch together, go back together or end.

No step follows a worker call that has not returned, so what counts is how each call returns: with
the one version that the other rank returns with, proved from the live parameters, or never.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes import state
from weightsync import failpoints
from weightsync.vllm.worker.between_steps import EXIT_STATUS, SingleRankGroup, switch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

pytestmark = pytest.mark.timeout(120)

#: Longest wait of a rank for the other one; the machine may be busy.
PATIENT_S, HASTY_S = 60.0, 2.0

Round = tuple[str, str]


@dataclass
class Pair:
    """Two processes."""

    folder: Path
    processes: list[subprocess.Popen[str]]

    def ends(self) -> list[int]:
        """Return how both ended."""
        return [process.wait(60) for process in self.processes]

    def told(self) -> list[list[dict[str, Any]]]:
        """Return what both printed."""
        return [
            [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
            for process in self.processes
        ]


@pytest.fixture
def folder() -> Iterator[Path]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    made = Path(tempfile.mkdtemp(prefix="sw"))
    yield made
    shutil.rmtree(made)


def _start(folder: Path, rounds: Sequence[Sequence[Round]], limit_s: float) -> Pair:
    """Start both ranks, each with its own rounds."""
    module = "tests.vllm.switching_rank"
    environment = {**os.environ, failpoints.VARIABLE: "", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder), str(limit_s), json.dumps(mine)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, mine in enumerate(rounds)
    ]
    return Pair(folder, processes)


def test_both_switch_or_both_are_back(folder: Path) -> None:
    # What fails on the first rank, what fails on the second, and whether both switch.
    cases = [
        ("", "", True),
        # Once each: the way back passes the same points.
        ("worker.half=1*error(ENOMEM)", "", False),
        ("", "worker.commit=1*error(ENOMEM)", False),
        ("", "worker.written=1*error(EIO)", False),
        ("worker.half=1*error(ENOMEM)", "worker.written=1*error(EIO)", False),
        # The first vote is whether both can begin, the second what both hold.
        ("", "worker.opinion=1>1*lie(no)", False),
        ("worker.opinion=1*lie(no)", "", False),
        ("", "worker.written=sleep(0.3)", True),
        ("", "", True),
    ]
    plans = [case[0] for case in cases], [case[1] for case in cases]
    rounds = [[(plan, f"call-{n}") for n, plan in enumerate(mine)] for mine in plans]
    pair = _start(folder, rounds, PATIENT_S)
    first, second = pair.told()
    assert pair.ends() == [0, 0]
    live = 1
    for (one, other, good), mine, its in zip(cases, first, second, strict=True):
        live = 3 - live if good else live
        for reply in (mine, its):
            assert (reply["ok"], reply["seed"], reply["whole"]) == (good, live, True), reply
            assert bool(reply["error"]) is not good
        assert mine["content_digest"] == its["content_digest"], (one, other)
    assert "Cannot allocate memory" in first[1]["error"]
    assert second[1]["error"] == "another rank failed"
    assert "nothing was written" in first[6]["error"]


@pytest.mark.parametrize(
    "plan",
    [
        "worker.vote=1>1*error(EIO)",
        pytest.param(
            "worker.half=1*error(EIO);worker.restore=1*error(EIO)", marks=pytest.mark.battery
        ),
        # Also on the way back.
        pytest.param("worker.half=2*error(EIO)", marks=pytest.mark.battery),
    ],
)
def test_both_end_when_the_way_back_fails(folder: Path, plan: str) -> None:
    pair = _start(folder, [[("", "call")], [(plan, "call")]], PATIENT_S)
    assert pair.told() == [[], []]
    assert pair.ends() == [EXIT_STATUS, EXIT_STATUS]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("worker.commit", marks=pytest.mark.battery),
        "worker.half",
        pytest.param("worker.written", marks=pytest.mark.battery),
    ],
)
def test_the_other_one_ends_when_one_dies(folder: Path, point: str) -> None:
    pair = _start(folder, [[("", "call")], [(f"{point}=panic", "call")]], PATIENT_S)
    begin = time.monotonic()
    assert pair.told() == [[], []]
    assert pair.ends() == [EXIT_STATUS, -signal.SIGKILL]
    # The link tells it, not the time limit.
    assert time.monotonic() - begin < PATIENT_S


@pytest.mark.parametrize(
    "point", ["worker.half", pytest.param("worker.vote", marks=pytest.mark.battery)]
)
def test_both_end_when_one_hangs(folder: Path, point: str) -> None:
    pair = _start(folder, [[("", "call")], [(f"{point}=stop", "call")]], HASTY_S)
    first, second = pair.processes
    try:
        assert first.wait(60) == EXIT_STATUS
        assert state(second.pid) == "T"
    finally:
        second.send_signal(signal.SIGCONT)
    # What it would step on, nobody could have agreed with.
    assert second.wait(60) == EXIT_STATUS
    assert pair.told() == [[], []]


@pytest.mark.battery
def test_ranks_that_are_asked_different_things_end(folder: Path) -> None:
    pair = _start(folder, [[("", "call")], [("", "another")]], PATIENT_S)
    assert pair.told() == [[], []]
    assert pair.ends() == [EXIT_STATUS, EXIT_STATUS]


class _Rank:
    """Stands for a rank whose parameters are never what was written; alone, so nobody restores."""

    proved = ""

    def __init__(self) -> None:
        self.held = "base"

    def commit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.held = ""
        return {"ok": False, "error": f"{args['apply_id']} is not what was written"}

    def holds(self, apply_id: str) -> bool:
        return self.held == apply_id


def test_one_rank_alone_ends_as_well() -> None:
    ended: list[bool] = []
    rank: Any = _Rank()
    args = {"apply_id": "new", "base_id": "base", "limit_s": 1, "call": "c"}
    with pytest.raises(Exception, match="base is not what was written"):
        switch(rank, args, SingleRankGroup(), lambda: ended.append(True))
    assert ended == [True]


def test_a_rank_that_does_not_hold_the_base_writes_nothing() -> None:
    rank: Any = _Rank()
    args = {"apply_id": "new", "base_id": "other", "limit_s": 1, "call": "c"}
    reply = switch(rank, args, SingleRankGroup(), pytest.fail)
    assert (reply["ok"], rank.held) == (False, "base")
    assert "does not hold the base" in reply["error"]
