"""The line that a terminal shows of a fleet's apply."""

from __future__ import annotations

from dataclasses import replace

from weightsync_client.cli.fleet_commands import describe
from weightsync_client.types import FleetMemberReport, FleetOrder, FleetReport

_HALF = FleetReport(
    apply=7,
    version=41,
    content_digest="",
    decision="",
    reason="",
    order=FleetOrder.BARRIER,
    decisions=0,
    decisions_needed=1,
    members=(
        FleetMemberReport("a", 1, prepared=True, ready=True, done=False),
        FleetMemberReport("b", 1, prepared=True, ready=False, done=False),
        FleetMemberReport("c", 1, prepared=False, ready=False, done=False),
    ),
)


def test_it_counts_members_in_each_phase() -> None:
    assert describe(_HALF) == (
        "apply 7, barrier: 2 of 3 prepared, 1 paused, 0 of 1 decisions, 0 live"
    )
    rolling = replace(_HALF, order=FleetOrder.ROLLING, decisions_needed=4)
    assert describe(rolling) == "apply 7, rolling: 2 of 3 prepared, 0 of 4 decisions, 0 live"


def test_it_names_the_decision_and_the_first_refusal() -> None:
    bad = replace(_HALF.members[2], reason="no [room]")
    decided = replace(_HALF, decision="ABORT", members=(*_HALF.members[:2], bad))
    assert describe(decided).endswith("0 live, ABORT (c: no [room])")
