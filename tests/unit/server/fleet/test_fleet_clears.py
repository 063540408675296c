"""Content that a rollback has rejected is accepted again by an apply that says so, everywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.fleet_hosts import version
from tests.support.fleet_tasks import in_format, until
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.fleet.content_marks import keep_marks
from weightsync_server.fleet.fleet_history import HistoryReader
from weightsync_server.fleet.fleet_keys import rejected_key
from weightsync_server.fleet.fleet_plan import FleetPlan, Kind, Verdict
from weightsync_server.fleet.fleet_records import decode_plan, encode_plan
from weightsync_server.register.register import MAX_VALUE_BYTES

if TYPE_CHECKING:
    from tests.support.fleet_tasks import Fleet

pytestmark = pytest.mark.timeout(60)

THIRD = version(3).digest


async def reject_third(fleet: Fleet, kind: Kind) -> None:
    """Have a fleet that serves 2 and has rejected 3, which all hosts know."""
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), kind)
    assert (await fleet.coordinator().rollback(kind)).target == version(2)
    await until(lambda: all(THIRD in host.rejected for host in fleet.hosts.values()))


async def rejects(fleet: Fleet) -> frozenset[str]:
    return (await HistoryReader(fleet.register).read()).rejects


@pytest.mark.parametrize("kind", Kind)
async def test_an_apply_that_clears_is_accepted_by_all_and_can_be_rejected_again(
    fleet: Fleet, kind: Kind
) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, kind)
    with pytest.raises(WeightSyncError, match="or set clear_rejected to have the fleet") as caught:
        await fleet.coordinator().apply(version(3), kind)
    assert caught.value.reason is Reason.VERSION_REJECTED
    outcome = await fleet.coordinator().apply(version(3), kind, clears=True)
    assert outcome.verdict is Verdict.COMMIT
    assert fleet.serving == {"a": 3, "b": 3}
    assert not any(host.rejected for host in fleet.hosts.values())
    # From now on it is as any other; another number of the same content as well.
    assert THIRD not in await rejects(fleet)
    await fleet.coordinator().apply(version(4), kind)
    again = replace(version(3), number=5)
    assert (await fleet.coordinator().apply(again, kind)).verdict is Verdict.COMMIT
    # And a rollback after that rejects it once more.
    await fleet.coordinator().rollback(kind)
    await until(lambda: all(THIRD in host.rejected for host in fleet.hosts.values()))
    with pytest.raises(WeightSyncError, match="was rejected by a rollback"):
        await fleet.coordinator().apply(replace(version(3), number=6), kind)


@pytest.mark.parametrize("kind", Kind)
async def test_one_that_is_decided_against_clears_nothing(fleet: Fleet, kind: Kind) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, kind)
    fleet.hosts["b"].refuses = {"prepare"}
    outcome = await fleet.coordinator().apply(version(3), kind, clears=True)
    assert outcome.verdict is Verdict.ABORT
    assert THIRD in await rejects(fleet)
    await fleet.until_serving(a=2, b=2)
    await until(lambda: all(THIRD in host.rejected for host in fleet.hosts.values()))


async def test_one_that_was_away_accepts_it_when_it_comes_back(fleet: Fleet) -> None:
    await fleet.start("a", "b")
    await reject_third(fleet, Kind.BARRIER)
    await fleet.kill("b")
    await asyncio.sleep(1.5)
    outcome = await fleet.coordinator().apply(version(3), Kind.BARRIER, clears=True)
    assert outcome.verdict is Verdict.COMMIT
    await fleet.start("b")
    await fleet.until_serving(a=3, b=3)
    assert not fleet.hosts["b"].rejected


async def test_what_was_said_last_counts_whoever_writes_it_late(fleet: Fleet) -> None:
    await fleet.start("a")
    await reject_third(fleet, Kind.BARRIER)
    await fleet.coordinator().apply(version(3), Kind.BARRIER, clears=True)
    # The plans go; the marks of their contents stay, each with the number of its apply.
    for number in range(4, 20):
        await fleet.coordinator().apply(version(number), Kind.BARRIER)
    history = await HistoryReader(fleet.register).read()
    assert history.floor > 4
    assert THIRD not in history.rejects
    # A member that was frozen in the rollback wakes up, and so does its coordinator.
    await fleet.register.create(rejected_key(THIRD), b"{}")
    plan = FleetPlan(3, "n", Kind.BARRIER, version(2), version(3), (("a",),), 1, rejects=THIRD)
    await keep_marks(fleet.register, [plan])
    assert THIRD not in await rejects(fleet)
    again = replace(version(3), number=20)
    assert (await fleet.coordinator().apply(again, Kind.BARRIER)).verdict is Verdict.COMMIT
    await fleet.coordinator().rollback(Kind.BARRIER)
    for number in range(21, 37):
        await fleet.coordinator().apply(version(number), Kind.BARRIER)
    assert THIRD in await rejects(fleet)


async def test_what_compaction_removes_is_kept_where_its_coordinator_died(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    for number in (2, 3):
        await fleet.coordinator().apply(version(number), Kind.BARRIER)
    await reject_without_marks(fleet, monkeypatch)
    await fleet.coordinator().apply(version(4), Kind.BARRIER)
    assert THIRD in await rejects(fleet)
    for number in range(5, 20):
        await fleet.coordinator().apply(version(number), Kind.BARRIER)
    history = await HistoryReader(fleet.register).read()
    assert history.floor > 4
    assert any(mark.number == 3 and mark.rejected for mark in history.marks)


async def reject_without_marks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roll back by a coordinator that dies as soon as that is decided."""
    coordinator = fleet.coordinator()

    async def dies(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(coordinator, "_settled", dies)
    with pytest.raises(asyncio.CancelledError):
        await coordinator.rollback(Kind.BARRIER)
    await until(lambda: fleet.serving == {"a": 2})


def test_a_plan_says_so_in_a_format_of_its_own() -> None:
    plan = FleetPlan(1, "n", Kind.BARRIER, version(2), None, (("a",),), 1)
    bare, clearing = encode_plan(plan, 1), encode_plan(replace(plan, clears=True), 1)
    assert bare == in_format(1, bare)
    assert clearing == in_format(3, clearing)
    assert decode_plan(clearing).clears
    assert not decode_plan(bare).clears


def test_why_a_rollback_was_asked_for_needs_no_format() -> None:
    plan = FleetPlan(1, "n" * 16, Kind.BARRIER, version(2), version(1), (("a",),), 1, key="k" * 128)
    told = encode_plan(replace(plan, rejects=THIRD, reason="bad answers"), 1)
    assert told == in_format(1, told)
    assert decode_plan(told).reason == "bad answers"
    for letter in ("x", "\x01", "\U0001f600"):
        assert len(encode_plan(replace(plan, reason=1024 * letter), 1)) <= MAX_VALUE_BYTES
