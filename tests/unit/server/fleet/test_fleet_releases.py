"""Two releases in one fleet: what a member does that cannot read a plan, then and afterwards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import in_format, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.decide import (
    ApplyOrder,
    ApplyPhase,
    DecisionPlan,
    FleetVersion,
    ParticipantReport,
    Verdict,
)
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_records import (
    FORMAT,
    decision_key,
    decode_report,
    encode_plan,
    encode_report,
    encode_roster,
    encode_verdict,
    parse_reports,
    plan_key,
    report_key,
    roster_key,
)

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(30)


async def plan_newer(
    fleet: Fleet, number: int, target: int, verdict: Verdict | None, *names: str
) -> None:
    """Write a plan of a newer release, and what its coordinator decided; None: nothing yet."""
    await write(fleet, DecisionPlan(
        number, f"n{number}", ApplyOrder.BARRIER, version(target), version(1), (names,), 1
    ), FORMAT + 1)  # fmt: skip
    if verdict is not None:
        value = encode_verdict(verdict, "newer")
        await fleet.register.create(decision_key(number, 1), value)


async def write(fleet: Fleet, plan: DecisionPlan, written_as: int) -> None:
    (part,) = encode_roster(plan.waves)
    await fleet.register.create(roster_key(plan.nonce, 0), part)
    body = in_format(written_as, encode_plan(plan, 1))
    await fleet.register.create(plan_key(plan.number), body)


async def test_a_member_of_an_older_release_says_that_it_is_not_ready(fleet: Fleet) -> None:
    await fleet.start("a")
    await plan_newer(fleet, 1, 2, None, "a")
    key = report_key(1, ApplyPhase.PREPARED, "a")
    while (said := await fleet.register.get(key)) is None:  # noqa: ASYNC110 - a register is asked
        await asyncio.sleep(0.01)
    report = decode_report(said)
    assert not report.ok
    assert (
        f"has format {FORMAT + 1}, this release knows 1 to {FORMAT}; update this member"
        in report.reason
    )
    assert fleet.serving == {"a": 1}


async def test_a_plan_that_was_aborted_counts_for_nothing_whoever_can_read_it(
    fleet: Fleet,
) -> None:
    await fleet.start("a")
    await plan_newer(fleet, 1, 2, Verdict.ABORT, "a")
    await fleet.kill("a")
    # Undecided, it would not know what to serve.
    fleet.hosts["a"]._change("stopped by somebody", serving=False)
    await fleet.start("a")
    fleet.members["a"]._journal.stopped_in = 1
    assert (await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)).number == 2
    assert fleet.serving == {"a": 3}


async def test_one_that_was_stopped_serves_again_after_a_newer_plan_was_aborted(
    fleet: Fleet,
) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.members["a"]._journal.stop(0)
    await fleet.kill("a")
    await plan_newer(fleet, 2, 3, None, "a")
    await fleet.start("a")
    await fleet.until_serving(a=0)
    await asyncio.sleep(0.3)
    assert fleet.serving == {"a": 0}
    value = encode_verdict(Verdict.ABORT, "newer", "a is not prepared")
    await fleet.register.create(decision_key(2, 1), value)
    await fleet.until_serving(a=2)


@pytest.mark.parametrize("outcome", [None, Verdict.ABORT])
async def test_what_a_commit_decided_that_cannot_be_read_is_never_undone(
    fleet: Fleet, outcome: Verdict | None
) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await fleet.kill("a")
    # Meanwhile: a commit in words that it does not know, and an apply in words that it does.
    await plan_newer(fleet, 2, 3, Verdict.COMMIT, "b")
    after = DecisionPlan(3, "n3", ApplyOrder.ROLLING, version(4), version(3), (("b",),), 2)
    await write(fleet, after, 1)
    if outcome is not None:
        await fleet.register.create(decision_key(3, 1), encode_verdict(outcome, "newer"))
    await fleet.start("a")
    await fleet.until_serving(a=3)
    what = [done for done, _ in fleet.hosts["a"].log]
    assert what[-2:] == ["fence", "commit"], "it served 2 beside a barrier's 3"


async def test_nobody_goes_back_past_a_commit_that_cannot_be_read(fleet: Fleet) -> None:
    await fleet.start("a")
    await fleet.coordinator().apply(version(2), ApplyOrder.BARRIER)
    await plan_newer(fleet, 2, 3, Verdict.COMMIT, "b")
    after = DecisionPlan(3, "n3", ApplyOrder.BARRIER, version(4), version(3), (("a",),), 1)
    await write(fleet, after, 1)
    await fleet.register.create(decision_key(3, 1), encode_verdict(Verdict.COMMIT, "newer"))
    await fleet.until_serving(a=4)
    with pytest.raises(WeightSyncError, match="apply 2 of the fleet cannot be read here") as caught:
        await fleet.coordinator().rollback(ApplyOrder.BARRIER)
    assert caught.value.reason == Reason.NOT_SUPPORTED
    with pytest.raises(WeightSyncError, match="version 4 is live in the fleet, above 3"):
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    # What is live now can be gone back to from the next one.
    await fleet.coordinator().apply(version(5), ApplyOrder.BARRIER)
    assert (await fleet.coordinator().rollback(ApplyOrder.BARRIER)).target == version(4)


async def test_a_newest_plan_that_was_committed_and_cannot_be_read_stops_who_starts(
    fleet: Fleet,
) -> None:
    await fleet.start("a")
    await fleet.members["a"]._journal.stop(0)
    await fleet.kill("a")
    await plan_newer(fleet, 1, 2, Verdict.COMMIT, "b")
    await plan_newer(fleet, 2, 3, Verdict.ABORT, "b")
    await fleet.start("a")
    await until(lambda: fleet.members["a"].view.history.unreadable)  # type: ignore[union-attr]  # it has started
    await asyncio.sleep(0.2)
    assert fleet.serving == {"a": 0}
    with pytest.raises(WeightSyncError, match="update this member"):
        await fleet.coordinator().apply(version(4), ApplyOrder.BARRIER)


async def test_one_that_serves_beside_a_commit_that_it_cannot_read_is_fenced(
    fleet: Fleet,
) -> None:
    await fleet.start("a")
    # As after a time without the register, in which the others went on.
    await plan_newer(fleet, 1, 2, Verdict.COMMIT, "b")
    await fleet.until_serving(a=0)
    after = DecisionPlan(2, "n2", ApplyOrder.ROLLING, version(3), version(2), (("b",),), 2)
    await write(fleet, after, 1)
    await fleet.until_serving(a=2)


def test_a_report_that_cannot_be_read_is_a_refusal() -> None:
    value = in_format(FORMAT + 1, encode_report(ParticipantReport(ok=True)))
    reports = parse_reports(7, {report_key(7, ApplyPhase.PREPARED, "b"): value})
    assert reports.refusal.startswith(f"b is not prepared: the report has format {FORMAT + 1}")
    assert reports.lacking(ApplyPhase.PREPARED, ["b"]) == ["b"]


async def test_damage_in_the_register_stops_no_member(fleet: Fleet) -> None:
    await fleet.start("a")
    plan = DecisionPlan(1, "n1", ApplyOrder.BARRIER, FleetVersion(2, "x"), None, (("a",),), 1)
    body = encode_plan(plan, 1).replace(b'"waves"', b'"others"')
    await fleet.register.create(plan_key(1), body)
    await until(lambda: fleet.members["a"].view.history.unreadable)  # type: ignore[union-attr]  # it has started
    await fleet.register.create(decision_key(1, 1), encode_verdict(Verdict.ABORT, "somebody"))
    assert (
        await fleet.coordinator().apply(version(3), ApplyOrder.BARRIER)
    ).verdict is Verdict.COMMIT
    reader = HistoryReader(fleet.register)
    assert (await reader.read()).number == 2
